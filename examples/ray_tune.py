"""
PPOExt in trials of Ray Tune: each trial is a training in a process of its own, on as many machines as Ray has.

Run it: pip install "ray[tune]" && python examples/ray_tune.py --samples 4 --timesteps 20000
Ray decides how many trials run at once; give the address of a cluster in the environment variable RAY_ADDRESS.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from ray import tune
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

from sb3_ppo_ext import FastDummyVecEnv, PPOExt


class Report(BaseCallback):
    """Reports the mean return of the last episodes after each rollout, so that a scheduler can end bad trials early."""

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        returns = [episode["r"] for episode in self.model.ep_info_buffer or ()]
        if returns:
            tune.report({"mean_return": float(np.mean(returns)), "timesteps": self.num_timesteps})


def train(config: dict) -> None:
    """One trial."""
    env = make_vec_env("CartPole-v1", 8, vec_env_cls=FastDummyVecEnv, seed=0)
    # Trials are independent of each other, whatever variables their processes inherit.
    options = {name: value for name, value in config.items() if name != "timesteps"}
    model = PPOExt("MlpPolicy", env, n_steps=32, batch_size=256, seed=0, device="cpu", distributed="off", **options)
    model.learn(config["timesteps"], callback=Report())


def main() -> None:
    """Tune two options, and print the best trial."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--timesteps", type=int, default=50_000)
    arguments = parser.parse_args()
    space = {
        "learning_rate": tune.loguniform(1e-4, 1e-2),
        "n_epochs": tune.choice([5, 10, 20]),
        "timesteps": arguments.timesteps,
    }
    scheduler = tune.schedulers.ASHAScheduler(
        time_attr="timesteps", max_t=arguments.timesteps, grace_period=arguments.timesteps // 10
    )
    config = tune.TuneConfig(metric="mean_return", mode="max", num_samples=arguments.samples, scheduler=scheduler)
    best = tune.Tuner(train, param_space=space, tune_config=config).fit().get_best_result()
    print(f"Best mean return: {best.metrics['mean_return']:.1f} with {best.config}")


if __name__ == "__main__":
    main()
