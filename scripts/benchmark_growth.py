"""
Steps per second of PPOExt and of SB3's PPO against the number of environments, the length of a rollout and the width of the
networks: where each comes to its limit.

CartPole-v1 in Gymnasium's vectorised form, which steps all copies in one call, so that the environment is not what limits; one
thread, four epochs of four minibatches. The two run in turns; the figure has the fastest of their turns, in processor time.

Run it: python scripts/benchmark_growth.py (two minutes). It writes docs/performance/growth.json and growth.svg.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gymnasium as gym
import torch as th
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecEnv, VecMonitor

from sb3_ppo_ext import PPOExt, VectorEnvAdapter
from sb3_ppo_ext.plot_run import COLORS, STYLE

OUT = Path(__file__).parents[1] / "docs" / "performance"
# What grows, and the values that it takes; the others are as in `BASE`
GROWING = {
    "n_envs": ("number of environments", (1, 8, 64, 256, 1024, 4096, 8192)),
    "n_steps": ("steps of a rollout\nin each environment", (8, 32, 128, 512, 2048)),
    "width": ("width of both hidden layers", (32, 64, 128, 256, 512, 1024)),
}
BASE = dict(n_envs=64, n_steps=32, width=64)
ALGORITHMS: dict[str, Any] = {"SB3": PPO, "PPOExt": PPOExt}
# Number of timesteps of a turn, at least one rollout
TURN = 4096


def make_env(n_envs: int) -> VecEnv:
    venv = gym.make_vec("CartPole-v1", num_envs=n_envs, vectorization_mode="vector_entry_point")
    return VecMonitor(VectorEnvAdapter(venv))


def make(algorithm: Any, n_envs: int, n_steps: int, width: int) -> Any:
    size, net_arch = max(n_envs * n_steps // 4, 2), [width, width]
    options = dict(n_steps=n_steps, batch_size=size, n_epochs=4, policy_kwargs=dict(net_arch=net_arch))
    return algorithm("MlpPolicy", make_env(n_envs), seed=0, device="cpu", **options)


def steps_per_second(values: dict[str, int], rounds: int) -> dict[str, float]:
    """
    :param values: Arguments of :func:`make`
    :param rounds: Number of turns of each
    :return: Steps per second of each algorithm
    """
    models = {name: make(algorithm, **values) for name, algorithm in ALGORITHMS.items()}
    fastest = dict.fromkeys(models, 0.0)
    for _ in range(rounds + 1):  # The first turn warms up.
        for name, model in models.items():
            before, start = model.num_timesteps, time.process_time()
            model.learn(TURN, reset_num_timesteps=False)
            fastest[name] = max(fastest[name], (model.num_timesteps - before) / (time.process_time() - start))
    return fastest


def plot(results: dict[str, dict[str, dict[str, float]]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(STYLE)
    figure, axes = plt.subplots(1, len(results), figsize=(7.2, 3.2), sharey=True, layout="constrained")
    for ax, (name, of_values) in zip(axes, results.items(), strict=True):
        for label, color in (("SB3", "0.45"), ("PPOExt", COLORS["PPOExt"])):
            ax.plot([int(value) for value in of_values], [each[label] for each in of_values.values()], "o-", color=color)
        ax.set(xscale="log", yscale="log", xlabel=GROWING[name][0])
    axes[0].set_ylabel("steps per second")
    figure.legend(axes[0].lines, ["SB3's PPO", "PPOExt"], loc="outside lower center", ncols=2)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="number of turns of each (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=OUT, help="output folder (default: docs/performance)")
    arguments = parser.parse_args()
    th.set_num_threads(1)
    warnings.simplefilter("ignore")
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name, (_, values) in GROWING.items():
        for value in values:
            found = steps_per_second({**BASE, name: value}, arguments.rounds)
            print(f"{name} {value}:", *(f"{label} {speed:,.0f}" for label, speed in found.items()), flush=True)
            results.setdefault(name, {})[str(value)] = found
    (arguments.out / "growth.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, arguments.out / "growth.svg")


if __name__ == "__main__":
    main()
