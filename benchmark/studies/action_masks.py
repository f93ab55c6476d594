"""
What masks of invalid actions are worth: the same task with and without them, and MaskablePPO of sb3-contrib.

There are 30 boxes, whose values the policy sees. Each step opens one, whose value is multiplied by 0.9 to the power of the
number of steps so far: the best order is from the most to the least valuable box. To choose a box that is open already is
invalid: without masks, the step is lost. Returns are given as a fraction of those of the best order.

Run it: python benchmark/studies/action_masks.py (about three minutes on two cores)
It writes benchmark/studies/action_masks.csv.gz and benchmark/studies/action_masks.svg.
"""

import time
from typing import Any

import numpy as np
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
from sb3_contrib import MaskablePPO

from sb3_ppo_ext import PPOExt

N_BOXES, DISCOUNT = 30, 0.9
ARMS = ("without masks", "masks", "MaskablePPO")
OPTIONS: dict[str, Any] = dict(n_steps=64, batch_size=256, n_epochs=10, learning_rate=1e-3, gamma=0.95, device="cpu")


class Boxes(BatchedEnv):
    """Open the boxes in the order of their values; the score is the fraction of the best return."""

    def __init__(self, n_envs: int, seed: int):
        space = spaces.Box(0.0, 1.0, (2 * N_BOXES,), np.float32)
        super().__init__(n_envs, space, spaces.Discrete(N_BOXES), N_BOXES, seed)
        self.values, self.closed = np.zeros((n_envs, N_BOXES)), np.ones((n_envs, N_BOXES), bool)
        self.best = np.ones(n_envs)

    def begin(self, which: np.ndarray) -> None:
        values = self.rng.random((int(which.sum()), N_BOXES))
        self.values[which], self.closed[which] = values, True
        self.best[which] = -np.sort(-values, axis=1) @ DISCOUNT ** np.arange(N_BOXES)

    def observe(self) -> np.ndarray:
        return np.concatenate([self.values * self.closed, self.closed], axis=1, dtype=np.float32)

    def act(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows = np.arange(self.num_envs)
        gains = self.values[rows, actions] * self.closed[rows, actions] * DISCOUNT**self.lengths
        self.closed[rows, actions] = False
        return gains, gains / self.best, np.logical_not(self.closed.any(axis=1))

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        assert method_name == "action_masks"
        return list(self.closed)

    def action_masks(self) -> None:
        """Asked for by name, through :meth:`env_method`."""


def run(job: Job) -> list[Row]:
    """Train one model."""
    arm, env = job.settings["arm"], Boxes(8, job.seed)
    recorder, start = Recorder({}, every=4), time.process_time()
    if arm == "MaskablePPO":
        model: Any = MaskablePPO("MlpPolicy", env, seed=job.seed, **OPTIONS)
        recorder._record = lambda: _record(recorder)  # type: ignore[method-assign]
    else:
        model = PPOExt("MlpPolicy", env, seed=job.seed, action_masking=arm == "masks", **OPTIONS)
    model.learn(job.timesteps, callback=recorder)
    seconds = time.process_time() - start
    return [{**row, "seconds": seconds} for row in recorder.rows]


def _record(recorder: Recorder) -> None:
    returns = [episode["r"] for episode in recorder.model.ep_info_buffer or ()]
    recorder.rows.append({"timesteps": recorder.num_timesteps, "return": float(np.mean(returns))})


def plot(rows: list[Row]) -> Figure:
    figure, [ax] = grid_of_axes(1)
    for arm, color in zip(ARMS, ("C1", "C0", "C2"), strict=True):
        plot_curve(ax, select(rows, arm=arm), "return", label=arm, color=color)
    ax.set(xlabel="1000 timesteps", ylabel="fraction of the best return")
    legend_below(figure, ax)
    return figure


def main() -> None:
    arguments = parse_arguments(__doc__, timesteps=100_000)
    rows = run_grid(run, [{"arm": arm} for arm in ARMS], arguments)
    write_csv(arguments.out / "action_masks.csv.gz", rows)
    lines = []
    for arm in ARMS:
        of_arm = select(rows, arm=arm)
        early, late = (
            per_seed(of_arm, "return", end=part * arguments.timesteps, start=(part - 0.1) * arguments.timesteps)
            for part in (0.2, 1)
        )
        lines.append([arm, mean_and_std(early), mean_and_std(late), mean_and_std(per_seed(of_arm, "seconds"), 1)])
    header = ["", "return after a fifth", "return at the end", "CPU seconds"]
    print_table("Fraction of the best return, mean ± std over seeds", header, lines)
    save_plot(plot(rows), arguments.out / "action_masks.svg")


if __name__ == "__main__":
    main()
