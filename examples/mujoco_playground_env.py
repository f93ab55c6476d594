"""
Train PPOExt on an environment of MuJoCo Playground, in thousands of copies on a GPU, or a few on a CPU.

    pip install "sb3-ppo-ext[zoo,jax]" playground
    python examples/mujoco_playground_env.py CartpoleBalance --n-envs 64 --timesteps 100000
"""

import argparse

from mujoco_playground import registry
from simulator_preset import simulator_preset

from sb3_ppo_ext import JaxVecEnv, PPOExt, TensorVecNormalize


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Train PPOExt on an environment of MuJoCo Playground")
    parser.add_argument("name", nargs="?", default="CartpoleBalance", help="name in its registry")
    parser.add_argument("--n-envs", type=int, default=2048)
    parser.add_argument("--timesteps", type=int, default=20_000_000)
    parser.add_argument("--impl", choices=["jax", "warp"], default="jax", help="engine of MuJoCo; warp is made for GPUs")
    arguments = parser.parse_args()

    # Not in `wrap_for_brax_training`: JaxVecEnv makes the copies and begins their episodes.
    simulator = registry.load(arguments.name, config_overrides={"impl": arguments.impl})
    env = TensorVecNormalize(JaxVecEnv(simulator, num_envs=arguments.n_envs), norm_reward=False)
    env.seed(0)
    model = PPOExt("MlpPolicy", env, seed=0, verbose=1, **simulator_preset(arguments.n_envs))
    model.learn(arguments.timesteps)
    model.save(f"{arguments.name}.zip")
    env.save(f"{arguments.name}.pkl")


if __name__ == "__main__":
    main()
