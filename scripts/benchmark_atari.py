"""
Where the time of training on images goes: SB3's PPO and PPOExt with ``CnnPolicy`` on Atari's Pong, eight environments, one
thread. The two run in turns; microseconds of processor time per step are medians over the rounds.

With `--same`, it says instead how far ``make("PongNoFrameskip-v4")`` ends from SB3's PPO with RL Zoo's entry `atari`.

Run it: python scripts/benchmark_atari.py (a minute; needs `ale-py` and `opencv-python`, or with `--envpool`, `envpool`)
"""

from __future__ import annotations

import argparse
import operator
import os
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch as th
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack
from torch.nn.utils import parameters_to_vector

from sb3_ppo_ext import EnvPoolVecEnv, PPOExt, make

PONG = "PongNoFrameskip-v4"
OPTIONS = dict(n_steps=128, batch_size=256, n_epochs=4, learning_rate=2.5e-4, ent_coef=0.01, clip_range=0.1, seed=0)
STEPS = 1024


def make_env(of_envpool: bool) -> VecEnv:
    if of_envpool:
        return EnvPoolVecEnv("Pong-v5", 8, num_threads=1)
    import ale_py  # noqa: F401  # registers the ids

    return VecFrameStack(make_atari_env(PONG, 8, seed=0), 4)


class Stopwatch:
    """Trains a model turn by turn, and measures its environment and its updates."""

    def __init__(self, model: Any):
        self.model, self.spent = model, {"environment": 0.0, "update": 0.0}
        model.env.step = self._timed("environment", model.env.step)
        model.train = self._timed("update", model.train)

    def _timed(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.process_time()
            returned = function(*args)
            self.spent[what] += time.process_time() - start
            return returned

        return timed

    def turn(self) -> dict[str, float]:
        """:return: Microseconds per step of each part, and in total as ``all``"""
        before, start = dict(self.spent), time.process_time()
        self.model.learn(STEPS, reset_num_timesteps=False)
        everything = time.process_time() - start
        taken = {what: self.spent[what] - before[what] for what in before}
        taken |= {"the rest": everything - sum(taken.values()), "all": everything}
        return {what: 1e6 * seconds / STEPS for what, seconds in taken.items()}


def compare_runs() -> None:
    """Print the largest difference between parameters of SB3's PPO, with the entry `atari` written out, and of ``make``."""
    decayed: dict[str, Any] = {name: partial(operator.mul, OPTIONS[name]) for name in ("learning_rate", "clip_range")}
    expected = trained(PPO("CnnPolicy", make_env(of_envpool=False), device="cpu", **OPTIONS | decayed))
    for backend in ("eager", "auto"):
        parameters = trained(make(PONG, seed=0, device="cpu", backend=backend)[0])
        print(f'backend="{backend}": differs from SB3 by at most {(parameters - expected).abs().max():.1g}')


def trained(model: OnPolicyAlgorithm) -> th.Tensor:
    return parameters_to_vector(model.learn(2 * STEPS).policy.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--envpool", action="store_true", help="EnvPool's Pong instead of ale-py's")
    parser.add_argument("--rounds", type=int, default=4, help="number of turns of each (default: %(default)s)")
    parser.add_argument("--same", action="store_true", help="compare results instead of times")
    arguments = parser.parse_args()
    th.set_num_threads(1)
    warnings.simplefilter("ignore")
    if arguments.same:
        return compare_runs()
    algorithms: dict[str, Any] = {"SB3": PPO, "PPOExt": PPOExt}
    watches = {
        name: Stopwatch(algorithm("CnnPolicy", make_env(arguments.envpool), device="cpu", **OPTIONS))
        for name, algorithm in algorithms.items()
    }
    rounds = [{name: watch.turn() for name, watch in watches.items()} for _ in range(arguments.rounds + 1)][1:]
    for name in watches:
        parts = {what: np.median([each[name][what] for each in rounds]) for what in rounds[0][name]}
        print(name, *(f"{what} {value:.0f}" for what, value in parts.items()), "µs per step", sep=", ")
    each_ratio = [each["SB3"]["all"] / each["PPOExt"]["all"] for each in rounds]
    print(f"ratio {np.median(each_ratio):.2f} ({min(each_ratio):.2f} to {max(each_ratio):.2f})", flush=True)
    os._exit(0)  # EnvPool's threads


if __name__ == "__main__":
    main()
