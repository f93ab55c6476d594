"""
How the advantage normalisations handle rewards whose scale drifts by a factor of 100 during the training.

A point in the plane has to reach a target, with a dense reward (minus the distance, at each step) or a rare one (1 on arrival,
which ends the episode). The training reward is multiplied by a factor that changes geometrically from 1 to 100 or from 100 to
1, or stays at 10. The returns in the results do not include the factor. In all variants the critic has to follow the factor as
well; its gradient is clipped separately, so that its error does not shrink the updates of the actor.

Run it: python benchmark/studies/reward_scale.py (about 7 minutes on two cores)
It writes benchmark/studies/reward_scale.csv.gz and benchmark/studies/reward_scale.svg.
"""

from typing import Any

import numpy as np
from common import (
    BAND,
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

TASKS = ("dense", "rare")
# The factor at the start and at the end of the training
DRIFTS = {"1 to 100": (1.0, 100.0), "100 to 1": (100.0, 1.0), "10": (10.0, 10.0)}
VARIANTS: dict[str, dict[str, Any]] = {
    "minibatch": {},
    "rollout": {"advantage_norm": "rollout"},
    "ema": {"advantage_norm": "ema"},
    "ema, alpha 0.2": {"advantage_norm": "ema", "adv_ema_alpha": 0.2},
    "ema, cold start": {"advantage_norm": "ema", "adv_ema_warm_start": False, "adv_min_std": 0.02},
}
N_ENVS, N_STEPS, EPISODE_LENGTH, RADIUS = 32, 32, 32, 0.05
KEYS = {"raw_std": "adv/raw_std", "ema_std": "adv/ema_std", "clamped": "adv/clamped_fraction", "kl": "train/approx_kl"}


class Reaching(BatchedEnv):
    """
    A point with bounded velocity starts in the middle of a square with a target in it.

    :param rare: Whether there is a reward on arrival only
    :param factors: Factors of the reward at the start and at the end of the training
    :param timesteps: Number of timesteps of the training
    :param seed: Seed of the pseudo random generator
    """

    def __init__(self, rare: bool, factors: tuple[float, float], timesteps: int, seed: int):
        square = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        super().__init__(N_ENVS, square, spaces.Box(-1.0, 1.0, (2,), np.float32), EPISODE_LENGTH, seed)
        self.rare, self.factors, self.timesteps = rare, factors, timesteps
        self.position, self.target = np.zeros((N_ENVS, 2)), np.zeros((N_ENVS, 2))

    def begin(self, which: np.ndarray) -> None:
        self.position[which] = 0.0
        self.target[which] = self.rng.uniform(-1.0, 1.0, (which.sum(), 2))

    def observe(self) -> np.ndarray:
        return np.concatenate([self.position, self.target], axis=1).astype(np.float32)

    def act(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self.position = np.clip(self.position + 0.1 * actions, -1.5, 1.5)
        distance = np.linalg.norm(self.position - self.target, axis=1)
        arrived = distance < RADIUS
        scores = arrived.astype(float) if self.rare else -distance
        return self.factor() * scores, scores, arrived & self.rare

    def factor(self) -> float:
        start, end = self.factors
        return start * (end / start) ** min(self.n_steps_done / self.timesteps, 1.0)


def run(job: Job) -> list[Row]:
    env = Reaching(job.settings["task"] == "rare", DRIFTS[job.settings["factor"]], job.timesteps, job.seed)
    model = PPOExt(
        "MlpPolicy",
        env,
        learning_rate=1e-3,
        critic_learning_rate=1e-3,
        n_steps=N_STEPS,
        batch_size=64,
        n_epochs=3,
        gamma=0.95,
        device="cpu",
        backend="eager",
        seed=job.seed,
        **VARIANTS[job.settings["advantage_norm"]],
    )
    recorder = Recorder(KEYS, every=3)
    model.learn(job.timesteps, callback=recorder)
    return recorder.rows


def report(rows: list[Row], timesteps: int) -> None:
    for task in TASKS:
        unit = "share of targets reached" if task == "rare" else "return"
        lines = []
        for name in VARIANTS:
            kinds = [select(rows, task=task, factor=drift, advantage_norm=name) for drift in DRIFTS]
            whole = [mean_and_std(per_seed(kind, "return")) for kind in kinds]
            final = [mean_and_std(per_seed(kind, "return", start=0.8 * timesteps)) for kind in kinds]
            lines.append([name, *whole, *final])
        header = ["advantage_norm", *(f"{d}, all" for d in DRIFTS), *(f"{d}, last 20%" for d in DRIFTS)]
        print_table(f"{task}: {unit}, mean over the training and over its end, mean ± std over seeds", header, lines)


def as_typed(variant: str) -> str:
    """:return: Name of a variant in the plot, with the options that are typed for it"""
    return variant.replace("alpha 0.2", "adv_ema_alpha=0.2").replace("cold start", "adv_ema_warm_start=False")


def plot(rows: list[Row]) -> Figure:
    # In a table that is read, the factor "10" is a number.
    rows = [{**row, "factor": str(row["factor"])} for row in rows]
    figure, axes = grid_of_axes(2 * len(TASKS) * len(DRIFTS), sharex=True)
    for row, drift in enumerate(DRIFTS):
        for column, task in enumerate(TASKS):
            returns, stds = axes[4 * row + column], axes[4 * row + 2 + column]
            for name in VARIANTS:
                kind = select(rows, task=task, factor=drift, advantage_norm=name)
                plot_curve(returns, kind, "return", label=as_typed(name))
                if "ema" in name:
                    color = returns.lines[-1].get_color()
                    plot_curve(stds, kind, "ema_std", color=color)
                    plot_curve(stds, kind, "raw_std", color=color, linestyle="--")
            returns.set(title=f"{task}, factor {drift}", ylabel="unscaled return")
            stds.set(title=f"{task}, factor {drift}", ylabel="std of advantages", yscale="log")
    for ax in axes[-2:]:
        ax.set_xlabel("1000 timesteps")
    legend_below(figure, axes[0], f"{BAND}\nstandard deviations: in use (solid), of the rollout (dashed)", n_columns=2)
    return figure


def main() -> None:
    arguments = parse_arguments(__doc__, timesteps=51 * N_ENVS * N_STEPS)
    settings = [
        {"task": task, "factor": drift, "advantage_norm": name} for task in TASKS for drift in DRIFTS for name in VARIANTS
    ]
    rows = run_grid(run, settings, arguments)
    write_csv(arguments.out / "reward_scale.csv.gz", rows)
    save_plot(plot(rows), arguments.out / "reward_scale.svg")
    report(rows, arguments.timesteps)


if __name__ == "__main__":
    main()
