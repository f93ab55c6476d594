"""
Why the entry `default` never finds the goal of MountainCarContinuous in some of its runs.

The reward is 100 at the goal and, at each step, minus a tenth of the squared action. Before the first goal, the penalty is all
that there is to learn from. The study follows the standard deviation of the Gaussian from rollout to rollout, with the entry
and with single changes of it, and measures how often a Gaussian with zero mean reaches the goal by chance.

Run it: python benchmark/studies/mountain_car.py (about 7 minutes on two cores)
It writes benchmark/studies/mountain_car.csv.gz and benchmark/studies/mountain_car.svg.
"""

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import yaml
from common import (
    Job,
    Recorder,
    Row,
    grid_of_axes,
    mean_and_std,
    parse_arguments,
    print_table,
    run_grid,
    save_plot,
    select,
    write_csv,
)
from matplotlib.figure import Figure
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ppo_ext import PPOExt

TASK = "MountainCarContinuous-v0"
ARMS: dict[str, dict[str, Any]] = {
    "default": {},
    "fixed standard deviation": {"policy_kwargs": dict(learn_std=False)},
    "ent_coef=0.01": {"ent_coef": 0.01},
    "gamma=0.999": {"gamma": 0.999},
    "without penalty": {},
}
# Standard deviations of the Gaussians that do not learn
CHANCES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
EPISODES_BY_CHANCE = 250


class WithoutPenalty(gym.RewardWrapper):
    """The reward is 100 at the goal, and nothing before it."""

    def reward(self, reward: float) -> float:  # type: ignore[override]
        return 100.0 if reward > 50.0 else 0.0


class GoalRecorder(Recorder):
    """
    Records the standard deviation of the Gaussian after each update, the goals of the rollout that led to it, and the
    correlation of its advantages with the squared actions.
    """

    def __init__(self) -> None:
        super().__init__({}, measure=self._measure)
        self.goals, self.correlation = 0, np.nan

    def _on_step(self) -> bool:
        ends = zip(self.locals["dones"], self.locals["infos"], strict=True)
        self.goals += sum(bool(done) and not info["TimeLimit.truncated"] for done, info in ends)
        return True

    def _on_rollout_end(self) -> None:
        assert isinstance(self.model, PPOExt)
        buffer = self.model.rollout_buffer
        squared = np.clip(buffer.actions, -1.0, 1.0) ** 2
        self.correlation = float(np.corrcoef(squared.flatten(), buffer.advantages.flatten())[0, 1])

    def _measure(self, model: PPOExt) -> Row:
        row = {"std": model.policy.log_std.exp().item(), "goals": self.goals, "correlation": self.correlation}
        self.goals = 0
        return row


def default_entry() -> dict[str, Any]:
    """:return: Hyperparameters in the entry `default`, as it was before the search"""
    entry = yaml.safe_load((Path(__file__).parents[1] / "ablation.yml").read_text())["default"]
    assert entry.pop("normalize")
    del entry["n_timesteps"]
    return entry


def run(job: Job) -> list[Row]:
    arm = job.settings["arm"]
    kwargs = {**default_entry(), **ARMS[arm]}
    wrapper = WithoutPenalty if arm == "without penalty" else None
    env = VecNormalize(
        make_vec_env(TASK, kwargs.pop("n_envs"), seed=job.seed, wrapper_class=wrapper), gamma=float(kwargs["gamma"])
    )
    model = PPOExt(env=env, seed=job.seed, device="cpu", **kwargs)
    recorder = GoalRecorder()
    model.learn(job.timesteps, callback=recorder)
    test = VecNormalize(make_vec_env(TASK, 10, seed=1000 + job.seed), training=False, norm_reward=False)
    test.obs_rms = env.obs_rms
    recorder.rows[-1]["evaluation"] = float(np.mean(evaluate_policy(model, test, 20, return_episode_rewards=True)[0]))
    return recorder.rows


def by_chance(job: Job) -> list[Row]:
    env = gym.make(TASK)
    std, rng, goals = job.settings["std"], np.random.default_rng(job.seed), 0
    env.reset(seed=job.seed)
    for _ in range(EPISODES_BY_CHANCE):
        terminated = truncated = False
        env.reset()
        while not (terminated or truncated):
            _, _, terminated, truncated, _ = env.step(np.clip(rng.normal(0.0, std, 1), -1.0, 1.0))
        goals += terminated
    return [{"goals": goals}]


def report(rows: list[Row]) -> None:
    lines = []
    for std in CHANCES:
        goals = [row["goals"] for row in select(rows, arm="zero mean", std=std)]
        lines.append([f"{std}", f"{100 * np.mean(goals) / EPISODES_BY_CHANCE:.2f} %"])
    print_table("Episodes of a Gaussian with zero mean that reach the goal", ["standard deviation", "episodes"], lines)
    lines = []
    for arm in ARMS:
        runs = list(by_seed(rows, arm).values())
        found = [next((row["timesteps"] for row in run if row["goals"]), None) for run in runs]
        solved = [run[-1]["evaluation"] > 0.0 for run in runs]
        missed = np.array([run[-1]["std"] for run, first in zip(runs, found, strict=True) if first is None])
        lines.append(
            [
                arm,
                f"{sum(first is not None for first in found)} of {len(runs)}",
                f"{sum(solved)} of {len(runs)}",
                mean_and_std(np.array([np.mean([row["correlation"] for row in run[:3]]) for run in runs])),
                mean_and_std(np.array([run[min(3, len(run) - 1)]["std"] for run in runs])),
                mean_and_std(missed) if len(missed) else "",
            ]
        )
    header = ["", "runs with a goal", "deterministic policy reaches it", "correlation, first three rollouts"]
    header += ["standard deviation after four updates", "at the end, without a goal"]
    print_table("mean ± std over seeds", header, lines)


def by_seed(rows: list[Row], arm: str) -> dict[int, list[Row]]:
    runs: dict[int, list[Row]] = {}
    for row in select(rows, arm=arm):
        runs.setdefault(row["seed"], []).append(row)
    return runs


def plot(rows: list[Row]) -> Figure:
    figure, axes = grid_of_axes(len(ARMS), sharex=True, sharey=True)
    for ax, arm in zip(axes, ARMS, strict=True):
        for run in by_seed(rows, arm).values():
            timesteps = np.array([row["timesteps"] for row in run]) / 1000
            stds, goals = np.array([row["std"] for row in run]), np.array([row["goals"] for row in run])
            label, color = ("reaches the goal", "C0") if run[-1]["evaluation"] > 0.0 else ("does not", "C1")
            ax.plot(timesteps, stds, color=color, alpha=0.6, linewidth=1, label=label)
            ax.scatter(timesteps[goals > 0], stds[goals > 0], color=color, s=8, label="rollout with a goal")
        ax.set(title=arm, ylabel="standard deviation")
    for ax in axes[-2:]:
        ax.set_xlabel("1000 timesteps")
    handles, labels = axes[0].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique, loc="outside lower center", ncols=3, title="a line for each seed", title_fontsize=8)
    return figure


def main() -> None:
    arguments = parse_arguments(__doc__, timesteps=20_480, seeds=20)
    rows = run_grid(run, [{"arm": arm} for arm in ARMS], arguments)
    rows += run_grid(by_chance, [{"arm": "zero mean", "std": std} for std in CHANCES], arguments)
    write_csv(arguments.out / "mountain_car.csv.gz", rows)
    save_plot(plot(rows), arguments.out / "mountain_car.svg")
    report(rows)


if __name__ == "__main__":
    main()
