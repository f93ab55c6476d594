"""
How two ranks of torchrun learn, compared with one process: the same numbers of environments, the same batch sizes and steps.

Both have RL Zoo's hyperparameters for PPO. Two ranks have half of the environments each. They are one run with the same
statistics, but draw other random numbers than one process, so that they can only be compared over seeds.

Run it: python benchmark/studies/ranks.py (about ten minutes on two cores)
It writes benchmark/studies/ranks.csv.gz and ranks.svg. It starts the two ranks by itself: in turns, both train one model,
and rank 0 trains one alone while the other waits.
"""

import os
import subprocess
import sys
from typing import Any

import numpy as np
import torch as th
import torch.distributed as dist
from common import (
    Job,
    Row,
    grid_of_axes,
    legend_below,
    mean_and_std,
    parse_arguments,
    print_table,
    read_csv,
    save_plot,
    select,
    write_csv,
)
from matplotlib.figure import Figure
from scipy.stats import mannwhitneyu
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

from sb3_ppo_ext import FastDummyVecEnv, PPOExt
from sb3_ppo_ext.distributed.launch import find_launch
from sb3_ppo_ext.distributed.ranks import connect

TASKS: dict[str, dict[str, Any]] = {
    "CartPole-v1": dict(
        n_envs=8,
        timesteps=100_000,
        options=dict(
            **dict(n_steps=32, batch_size=256, gae_lambda=0.8, gamma=0.98, n_epochs=20),
            **dict(learning_rate="lin_0.001", clip_range="lin_0.2"),
        ),
    ),
    "Pendulum-v1": dict(
        n_envs=4,
        timesteps=100_000,
        options=dict(
            **dict(n_steps=1024, batch_size=64, gae_lambda=0.95, gamma=0.9, n_epochs=10),
            **dict(learning_rate=1e-3, use_sde=True, sde_sample_freq=4),
        ),
    ),
}
ARMS = ("one process", "two ranks")


class Returns(BaseCallback):
    """Records the mean return of the last episodes of all ranks, after each rollout."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Row] = []

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        returns = [episode["r"] for episode in self.model.ep_info_buffer or ()]
        if returns:
            self.rows.append({"timesteps": self.num_timesteps, "return": float(np.mean(returns))})


def run(job: Job, n_ranks: int) -> list[Row]:
    """Train one model, together with the other ranks or alone."""
    task = TASKS[job.settings["task"]]
    env = make_vec_env(job.settings["task"], task["n_envs"] // n_ranks, vec_env_cls=FastDummyVecEnv)
    model = PPOExt(
        "MlpPolicy",
        env,
        seed=job.seed,
        device="cpu",
        distributed="auto" if n_ranks > 1 else "off",
        stats_window_size=20,
        **task["options"],
    )
    callback = Returns()
    model.learn(job.timesteps, callback=callback)
    callback._on_rollout_start()
    return [{**job.settings, "seed": job.seed, **row} for row in callback.rows]


def train_in_turns(arguments: Any) -> None:
    """What each of the two ranks does."""
    th.set_num_threads(1)
    ranks = connect(find_launch("auto"))
    rows: list[Row] = []
    for task, settings in TASKS.items():
        for seed in range(arguments.seeds):
            length = min(settings["timesteps"], arguments.timesteps or settings["timesteps"])
            rows += run(Job({"task": task, "arm": ARMS[1]}, seed, length), ranks.size)
            if ranks.is_first:
                rows += run(Job({"task": task, "arm": ARMS[0]}, seed, length), 1)
                print(f"{task}, seed {seed}", flush=True)
            dist.barrier()
    if ranks.is_first:
        write_csv(arguments.out / "ranks.csv.gz", rows)


def finals(rows: list[Row], task: str, arm: str) -> np.ndarray:
    kind = select(rows, task=task, arm=arm)
    return np.array([select(kind, seed=seed)[-1]["return"] for seed in sorted({row["seed"] for row in kind})])


def report(rows: list[Row]) -> None:
    lines = []
    for task in TASKS:
        one, two = (finals(rows, task, arm) for arm in ARMS)
        p = f"{mannwhitneyu(one, two).pvalue:.2f}" if len(one) > 1 else "-"
        lines.append([task, mean_and_std(one), mean_and_std(two), p])
    print_table("Mean return of the last 20 episodes, mean ± std over seeds", ["task", *ARMS, "p"], lines)


def plot(rows: list[Row]) -> Figure:
    figure, axes = grid_of_axes(len(TASKS))
    for ax, task in zip(axes, TASKS, strict=True):
        for arm, color in zip(ARMS, ("C0", "C1"), strict=True):
            for seed in sorted({row["seed"] for row in rows}):
                one = select(rows, task=task, arm=arm, seed=seed)
                steps, returns = [row["timesteps"] / 1000 for row in one], [row["return"] for row in one]
                ax.plot(steps, returns, color=color, lw=1, label=arm if seed == 0 else None)
        ax.set(title=task, xlabel="1000 timesteps", ylabel="return")
    legend_below(figure, axes[0], "a line for each seed")
    return figure


def main() -> None:
    arguments = parse_arguments(__doc__, timesteps=None)
    if "RANK" in os.environ:
        train_in_turns(arguments)
        return
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *sys.argv]
    subprocess.run(command, check=True, env=environment)
    rows = read_csv(arguments.out / "ranks.csv.gz")
    report(rows)
    save_plot(plot(rows), arguments.out / "ranks.svg")


if __name__ == "__main__":
    main()
