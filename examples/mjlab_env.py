"""
Train PPOExt on a task of mjlab, whose environments step in PyTorch on a GPU. It follows mjlab's sources and a stand-in with
their contract; it has not been run on mjlab itself.

    pip install "sb3-ppo-ext[zoo]" mjlab
    python examples/mjlab_env.py Mjlab-Velocity-Flat-Unitree-G1
"""

import argparse

import mjlab.tasks  # noqa: F401  # registers the tasks
import numpy as np
from gymnasium import spaces
from mjlab.envs import ManagerBasedRlEnv
from mjlab.tasks.registry import load_env_cfg
from simulator_preset import simulator_preset

from sb3_ppo_ext import PPOExt, TensorVecNormalize, TorchVecEnv


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Train PPOExt on a task of mjlab")
    parser.add_argument("task", nargs="?", default="Mjlab-Velocity-Flat-Unitree-G1")
    parser.add_argument("--n-envs", type=int, default=4096)
    parser.add_argument("--timesteps", type=int, default=100_000_000)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()

    cfg = load_env_cfg(arguments.task)
    cfg.scene.num_envs = arguments.n_envs
    simulator = ManagerBasedRlEnv(cfg, device=arguments.device)
    # mjlab's actions have no bounds, in radians around a pose; a policy needs some.
    actions = spaces.Box(-5.0, 5.0, simulator.single_action_space.shape, np.float32)
    # The critic reads what only the simulator knows; the actor does not.
    copies = TorchVecEnv(simulator, keys=["actor", "critic"], action_space=actions)
    env = TensorVecNormalize(copies, norm_reward=False)
    hyperparams = simulator_preset(arguments.n_envs)
    hyperparams["policy_kwargs"] |= {"actor_keys": ["actor"], "critic_keys": ["critic"]}
    model = PPOExt("MultiInputPolicy", env, seed=0, verbose=1, device=arguments.device, **hyperparams)
    model.learn(arguments.timesteps)
    model.save(f"{arguments.task}.zip")
    env.save(f"{arguments.task}.pkl")


if __name__ == "__main__":
    main()
