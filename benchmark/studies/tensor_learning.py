"""
Learning curves of PPOExt on environments of gymnax, beside published returns.

CartPole-v1 and the two games of MinAtar have the hyperparameters of PureJaxRL's PPO
(https://github.com/luchris429/purejaxrl, `purejaxrl/ppo.py` for CartPole-v1 and `examples/brax_minatar.ipynb` for the games),
with MLPs of 64-64 units on flattened observations, as theirs. Two things differ: episodes that run out of time are truncated,
so that the value of their last observation counts, whereas theirs are terminated; and returns are means over the last 100
episodes.

PureJaxRL publishes nothing on Pendulum-v1. It has the hyperparameters of gymnax-blines
(https://github.com/RobertTLange/gymnax-blines, `agents/Pendulum-v1/ppo.yaml`), but not its network, which has ReLU and
computes the standard deviation from the observation; and once more those of RL Zoo without gSDE, for 16 copies.

The learning rate of the games falls as in a training run of ten million steps, of which the study makes the first part.

Run it: python benchmark/studies/tensor_learning.py (half an hour on one core; needs gymnax)
It writes benchmark/studies/tensor_learning.csv.gz and benchmark/studies/tensor_learning.svg.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from common import (
    BAND,
    Job,
    Recorder,
    Row,
    grid_of_axes,
    legend_below,
    mean_and_std,
    parse_arguments,
    plot_curve,
    print_table,
    read_csv,
    run_task,
    save_plot,
    select,
)
from matplotlib.figure import Figure
from torch import nn

from sb3_ppo_ext import JaxVecEnv, PPOExt


@dataclass(frozen=True)
class Task:
    """
    An environment of gymnax.

    :param timesteps: Timesteps of a run
    :param n_envs: Number of its copies
    :param learning_rate: Learning rate at the beginning
    :param options: Further arguments of ``PPOExt``
    :param horizon: Timesteps after which the learning rate would be zero; ``None`` if it is constant
    :param published: Published returns by the number of timesteps
    :param source: Where they were published
    """

    timesteps: int
    n_envs: int
    learning_rate: float
    options: dict[str, Any]
    horizon: int | None = None
    published: dict[int, float] = field(default_factory=dict)
    source: str = "PureJaxRL"


# PureJaxRL halves the value loss, and clips values towards the worse of the two losses.
COMMON: dict[str, Any] = dict(n_steps=128, n_epochs=4, ent_coef=0.01, vf_coef=0.25, clip_range_vf=0.2, vf_clip_mode="max")
RELU: dict[str, Any] = dict(policy_kwargs=dict(activation_fn=nn.ReLU))
MINATAR: dict[str, Any] = dict(**COMMON, **RELU, batch_size=1024)
TASKS = {
    # From the plot in README.md, a mean over seeds
    "CartPole-v1": Task(500_000, 4, 2.5e-4, dict(**COMMON, batch_size=128), 500_000, {500_000: 500}),
    # From README.md of gymnax
    "Pendulum-v1": Task(
        1_000_000,
        32,
        5e-4,
        dict(COMMON, n_steps=16, batch_size=128, max_grad_norm=1.0),
        None,
        {1_000_000: -130},
        "gymnax-blines",
    ),
    "Pendulum-v1, RL Zoo": Task(
        100_000, 16, 1e-3, dict(n_steps=256, batch_size=64, gamma=0.9), None, {1_000_000: -130}, "gymnax-blines"
    ),
    # From the plot in README.md, whose axis are the seconds of a run, taken to have ten million steps as the notebook's
    "Breakout-MinAtar": Task(
        1_000_000, 64, 5e-3, MINATAR, 10_000_000, {500_000: 15, 1_000_000: 21, 2_000_000: 23, 3_000_000: 24, 10_000_000: 40}
    ),
    # From the plot in examples/brax_minatar.ipynb, one seed
    "SpaceInvaders-MinAtar": Task(
        1_000_000, 64, 5e-3, MINATAR, 10_000_000, {500_000: 27, 1_000_000: 71, 2_000_000: 103, 3_000_000: 119, 10_000_000: 167}
    ),
}


def falling(learning_rate: float, timesteps: int, horizon: int) -> Callable[[float], float]:
    """Schedule of a training run of ``horizon`` timesteps, for its first ``timesteps``."""
    return lambda progress_remaining: learning_rate * (1 - (1 - progress_remaining) * timesteps / horizon)


def run(job: Job) -> list[Row]:
    name = job.settings["task"]
    task = TASKS[name]
    n_rollouts = job.timesteps // (task.n_envs * task.options["n_steps"])
    recorder = Recorder({}, every=max(1, n_rollouts // 50))
    rate = task.learning_rate if task.horizon is None else falling(task.learning_rate, job.timesteps, task.horizon)
    env = JaxVecEnv(name.split(",")[0], num_envs=task.n_envs)
    model = PPOExt("MlpPolicy", env, learning_rate=rate, seed=job.seed, device="cpu", **task.options)
    model.learn(job.timesteps, callback=recorder)
    return [row for row in recorder.rows if "return" in row]


def finals(rows: list[Row]) -> np.ndarray:
    """Return at the end of each run, shape ``(n_seeds,)``."""
    return np.array([select(rows, seed=seed)[-1]["return"] for seed in sorted({row["seed"] for row in rows})])


def published(task: Task, timesteps: int) -> str:
    texts = [f"{value:g} after {steps / 1e6:g} million" for steps, value in task.published.items() if steps >= timesteps * 0.9]
    return f"{texts[0]} ({task.source})" if texts else ""


def report(rows: list[Row]) -> None:
    lines = []
    for name, task in TASKS.items():
        of_task = select(rows, task=name)
        if of_task:
            timesteps = max(row["timesteps"] for row in of_task)
            lines.append([name, f"{timesteps / 1e6:.1f}", mean_and_std(finals(of_task), 1), published(task, timesteps)])
    print_table("Returns, mean ± std over seeds", ["task", "million steps", "PPOExt", "published"], lines)


def plot(rows: list[Row]) -> Figure:
    figure, axes = grid_of_axes(len(TASKS))
    for ax, (name, task) in zip(axes, TASKS.items(), strict=True):
        of_task = select(rows, task=name)
        if of_task:
            plot_curve(ax, of_task, "return", label="PPOExt")
            end = max(row["timesteps"] for row in of_task)
            for steps, value in task.published.items():
                if steps <= 1.1 * end:
                    ax.plot(steps / 1000, value, "kx")
                else:
                    ax.axhline(value, color="k", linestyle=":", linewidth=0.8)
        ax.set(title=name, xlabel="1000 timesteps", ylabel="return")
    note = f"{BAND}\npublished returns: crosses at that step, dotted lines for later ones"
    legend_below(figure, axes[0], note)
    return figure


def main() -> None:
    arguments = parse_arguments(__doc__, timesteps=None, tasks=list(TASKS))
    path = arguments.out / "tensor_learning.csv.gz"
    for name in arguments.tasks:
        run_task(run, name, TASKS[name].timesteps, ["PPOExt"], arguments, path)
    rows = read_csv(path)
    save_plot(plot(rows), arguments.out / "tensor_learning.svg")
    report(rows)


if __name__ == "__main__":
    main()
