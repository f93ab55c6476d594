"""
Where the mean action drifts if the best action is at a bound, and how long it takes to recover.

The policy is a Gaussian whose samples are clipped to [-2, 2]. In the first half of the training the upper bound is the best
action, in the second half the lower one. The reward is linear in the clipped action, or decreases quadratically with the
distance from the best action. The study compares coefficients of the bounds loss. The mean action and its standard deviation
are in units of the bound.

Run it: python benchmark/studies/bounds.py (about 7 minutes on two cores)
It writes benchmark/studies/bounds.csv.gz and benchmark/studies/bounds.svg.
"""

from typing import Any

import numpy as np
import torch as th
from common import (
    BatchedEnv,
    Job,
    Recorder,
    Row,
    grid_of_axes,
    legend_below,
    mean_and_std,
    parse_arguments,
    per_seed,
    plot_curve,
    print_table,
    run_grid,
    save_plot,
    select,
    write_csv,
)
from gymnasium import spaces
from matplotlib.figure import Figure

from sb3_ppo_ext import PPOExt

TASKS = ("linear", "quadratic")
COEFFICIENTS = (0.0, 1e-3, 1e-2, 1e-1, 1.0)
BOUND = 2.0
N_ENVS, N_STEPS, EPISODE_LENGTH = 16, 16, 8
KEYS = {"at_bounds": "train/actions_at_bounds", "bounds_loss": "train/bounds_loss"}


class Pushing(BatchedEnv):
    """
    The best action is at a bound, whatever the observation: at the upper one in the first half of the training, then at the
    lower.

    The score of a step is in [-1, 1] for the linear task and in [-3, 1] for the quadratic one; the reward is noisy.

    :param quadratic: Whether the reward is quadratic
    :param timesteps: Number of timesteps of the training
    :param seed: Seed of the pseudo random generator
    """

    def __init__(self, quadratic: bool, timesteps: int, seed: int):
        square = spaces.Box(-1.0, 1.0, (2,), np.float32)
        super().__init__(N_ENVS, square, spaces.Box(-BOUND, BOUND, (1,), np.float32), EPISODE_LENGTH, seed)
        self.quadratic, self.timesteps = quadratic, timesteps

    def begin(self, which: np.ndarray) -> None:
        pass

    def observe(self) -> np.ndarray:
        return self.rng.uniform(-1.0, 1.0, (N_ENVS, 2)).astype(np.float32)

    def act(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        best = 1.0 if self.n_steps_done < self.timesteps / 2 else -1.0
        off = np.abs(actions[:, 0] / BOUND - best)
        scores = 1 - (off**2 if self.quadratic else off)
        return scores + self.rng.normal(0.0, 0.1, N_ENVS), scores / EPISODE_LENGTH, np.zeros(N_ENVS, bool)


def mean_action(model: PPOExt) -> Row:
    """Mean and standard deviation of the policy over a grid of observations, in units of the bound."""
    grid = th.cartesian_prod(th.linspace(-1, 1, 5), th.linspace(-1, 1, 5))
    with th.no_grad():
        normal: Any = model.policy.get_distribution(grid).distribution
    return {"mean_action": normal.mean.mean().item() / BOUND, "std": normal.stddev.mean().item() / BOUND}


def run(job: Job) -> list[Row]:
    model = PPOExt(
        "MlpPolicy",
        Pushing(job.settings["task"] == "quadratic", job.timesteps, job.seed),
        n_steps=N_STEPS,
        batch_size=64,
        gamma=0.9,
        stats_window_size=2 * N_ENVS,  # the episodes of one rollout
        device="cpu",
        backend="eager",
        seed=job.seed,
        bounds_coef=job.settings["bounds_coef"],
    )
    recorder = Recorder(KEYS, every=4, measure=mean_action)
    model.learn(job.timesteps, callback=recorder)
    return recorder.rows


def steps_to_return(rows: list[Row], flip: float, threshold: float = 0.8) -> np.ndarray:
    """Timesteps of each seed from the change of the task to the first return above the threshold, or else to the end."""
    times = []
    for seed in sorted({row["seed"] for row in rows}):
        after = [row for row in select(rows, seed=seed) if row["timesteps"] > flip]
        reached = [row["timesteps"] for row in after if row["return"] > threshold]
        times.append((reached[0] if reached else after[-1]["timesteps"]) - flip)
    return np.array(times)


def report(rows: list[Row], timesteps: int) -> None:
    flip = timesteps / 2
    header = ["bounds_coef", "mean action at the flip", "std at the flip", "return, 1st half", "return, 2nd half"]
    header += ["1000 steps back to 0.8", "mean action at the end"]
    for task in TASKS:
        lines = []
        for coefficient in COEFFICIENTS:
            kind = select(rows, task=task, bounds_coef=coefficient)
            at_flip = {"start": 0.45 * timesteps, "end": flip}
            cells = [per_seed(kind, "mean_action", **at_flip), per_seed(kind, "std", **at_flip)]
            cells += [per_seed(kind, "return", end=flip), per_seed(kind, "return", start=flip)]
            cells += [steps_to_return(kind, flip) / 1000, per_seed(kind, "mean_action", start=0.95 * timesteps)]
            lines.append([f"{coefficient:g}", *(mean_and_std(cell) for cell in cells)])
        print_table(f"{task}, mean ± std over seeds", header, lines)


def plot(rows: list[Row]) -> Figure:
    labels = {"return": "return per step", "mean_action": "mean action / bound", "std": "standard deviation / bound"}
    panels = [(column, task) for column in labels for task in TASKS]
    figure, axes = grid_of_axes(len(panels), sharex=True)
    for ax, (column, task) in zip(axes, panels, strict=True):
        for coefficient in COEFFICIENTS:
            plot_curve(ax, select(rows, task=task, bounds_coef=coefficient), column, label=f"bounds_coef={coefficient:g}")
        if column == "mean_action":
            for bound in (-1, 1):
                ax.axhline(bound, color="0.5", linestyle=":", linewidth=1)
        ax.set(title=task, xlabel="1000 timesteps", ylabel=labels[column])
    legend_below(figure, axes[0])
    return figure


def main() -> None:
    arguments = parse_arguments(__doc__, timesteps=200 * N_ENVS * N_STEPS)
    settings = [{"task": task, "bounds_coef": coefficient} for task in TASKS for coefficient in COEFFICIENTS]
    rows = run_grid(run, settings, arguments)
    write_csv(arguments.out / "bounds.csv.gz", rows)
    save_plot(plot(rows), arguments.out / "bounds.svg")
    report(rows, arguments.timesteps)


if __name__ == "__main__":
    main()
