"""
Which action distribution learns best: a clipped Gaussian, a squashed Gaussian, or a Beta distribution.

The hyperparameters are those that RL Zoo tuned for PPO with its Gaussian, the same for the three distributions. Where these
use gSDE (generalised state-dependent exploration), the distributions run without it, and the Zoo's unchanged entry is a fourth
arm. BangBang is a task of our own whose optimum lies at the bounds. The deterministic policy is evaluated.

Run it: python benchmark/studies/action_distributions.py (about an hour on two cores; it needs RL Zoo, MuJoCo and Box2D)
It writes benchmark/studies/action_distributions.csv.gz after each task, and
action_distributions.svg beside it. With `--tasks` it
runs some of the tasks and keeps the rows of the others. The published table has three seeds of LunarLander and Swimmer:
`--seeds 3 --tasks LunarLanderContinuous-v3 Swimmer-v5`. For these two, it uses less than a fifth of the Zoo's steps.
"""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import yaml
from common import (
    Job,
    Recorder,
    Row,
    finals,
    grid_of_axes,
    legend_below,
    mean_and_std,
    parse_arguments,
    plot_curve,
    read_csv,
    run_task,
    save_plot,
    select,
)
from gymnasium import spaces
from matplotlib.figure import Figure
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, sync_envs_normalization

from sb3_ppo_ext import PPOExt

DISTRIBUTIONS = ("gaussian", "squashed_gaussian", "beta")
ZOO = "zoo"
COLORS = dict(zip((*DISTRIBUTIONS, ZOO), ("C0", "C1", "C2", "0.4"), strict=True))
N_EVALUATIONS = 10
EVALUATION_SEED = 1000
KEYS = {
    "mass_near_bounds": "train/mass_near_bounds",
    "at_bounds": "train/actions_at_bounds",
    "entropy_loss": "train/entropy_loss",
    "std": "train/std",
    "concentration": "train/concentration",
}


@dataclass(frozen=True)
class Task:
    """
    :param entry: Environment whose entry in the Zoo's file has the hyperparameters
    :param timesteps: Number of timesteps of a run
    :param n_episodes: Number of episodes of an evaluation; the last evaluation has twice as many
    """

    entry: str
    timesteps: int
    n_episodes: int = 10


TASKS = {
    "Pendulum-v1": Task("Pendulum-v1", 100_000),
    "MountainCarContinuous-v0": Task("MountainCarContinuous-v0", 20_000),
    "BangBang": Task("BangBang", 60_000),
    "LunarLanderContinuous-v3": Task("LunarLanderContinuous-v3", 180_000, 5),
    "Swimmer-v5": Task("Swimmer-v4", 100_000, 5),
}
# SB3's defaults, except for 16 environments and a gamma for episodes of about 25 steps: with 0.99 nothing was learned.
BANG_BANG = {"normalize": True, "policy": "MlpPolicy", "n_envs": 16, "n_steps": 128, "gamma": 0.95}


class BangBang(gym.Env):
    """
    A mass between two walls has to come to rest in the middle as soon as possible, by a force in [-1, 1]. The optimum is to
    push at full force in one direction, and from some point on at full force in the other. Aimed at the exact middle, this
    takes 25 steps on average; a random force takes 87.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    time_step, near, slow, episode_length = 0.05, 0.1, 0.2, 100

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.position, self.velocity = self.np_random.uniform((-1.0, -0.5), (1.0, 0.5))
        self.length = 0
        return self._observe(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.velocity += self.time_step * float(action[0])
        self.position += self.time_step * self.velocity
        if abs(self.position) > 1:
            self.position, self.velocity = float(np.sign(self.position)), 0.0
        self.length += 1
        there = abs(self.position) < self.near and abs(self.velocity) < self.slow
        return self._observe(), -1.0, there, self.length >= self.episode_length and not there, {}

    def _observe(self) -> np.ndarray:
        return np.array([self.position, self.velocity], np.float32)


class Evaluations(Recorder):
    """
    Also records the mean return of the deterministic policy, about ten times during the training and once at its end. The last
    evaluation has twice as many episodes as the others, so the last step of a curve is partly due to other initial states.

    :param task: The task that is trained
    :param env: The environment for the evaluation
    :param every: Number of updates between two evaluations
    """

    def __init__(self, task: Task, env: VecEnv, every: int):
        super().__init__(KEYS, every, self.evaluate)
        self.env, self.n_episodes = env, task.n_episodes

    def evaluate(self, model: BaseAlgorithm) -> Row:
        training_env = model.get_env()
        assert training_env is not None
        sync_envs_normalization(training_env, self.env)
        # The same initial states each time, and for every action distribution
        self.env.seed(EVALUATION_SEED)
        returns, _ = evaluate_policy(model, self.env, self.n_episodes, return_episode_rewards=True)
        return {"evaluation": float(np.mean(returns))}

    def _on_training_end(self) -> None:
        self.n_episodes *= 2
        self._record()


@cache
def zoo_entries() -> dict[str, dict[str, Any]]:
    zoo = importlib.util.find_spec("rl_zoo3")
    assert zoo is not None
    assert zoo.origin is not None
    path = Path(zoo.origin).parent / "hyperparams" / "ppo.yml"
    return {**yaml.safe_load(path.read_text()), "BangBang": BANG_BANG}


def arms(task: str) -> list[str]:
    """The distributions, and the Zoo's entry where it differs from the one that the Gaussian uses."""
    return [*DISTRIBUTIONS, *([ZOO] if zoo_entries()[TASKS[task].entry].get("use_sde") else [])]


def hyperparameters(task: str, arm: str) -> dict[str, Any]:
    """The Zoo's entry; for the distributions, without the hyperparameters of gSDE."""
    entry = dict(zoo_entries()[TASKS[task].entry])
    entry.pop("n_timesteps", None)
    if isinstance(entry.get("policy_kwargs"), str):
        entry["policy_kwargs"] = eval(entry["policy_kwargs"])
    if arm != ZOO:
        if entry.pop("use_sde", False):
            entry.get("policy_kwargs", {}).pop("log_std_init", None)
        entry.pop("sde_sample_freq", None)
        entry["action_dist"] = arm
    return entry


def make_envs(task: str, n_envs: int, seed: int, normalize: dict[str, Any] | None) -> VecEnv:
    """
    :param task: Name of the task
    :param n_envs: Number of environments
    :param seed: Seed of the first environment
    :param normalize: Keyword arguments of ``VecNormalize``, ``None`` for no normalisation
    """
    env_id: str | Callable[..., gym.Env] = BangBang if task == "BangBang" else task
    env = make_vec_env(env_id, n_envs, seed=seed)
    return env if normalize is None else VecNormalize(env, **normalize)


def run(job: Job) -> list[Row]:
    name, task = job.settings["task"], TASKS[job.settings["task"]]
    entry = hyperparameters(name, job.settings["arm"])
    n_envs = entry.pop("n_envs", 1)
    normalize: dict[str, Any] | None = {"gamma": entry["gamma"]} if entry.pop("normalize", False) else None
    frozen = normalize and {**normalize, "norm_reward": False, "training": False}
    n_updates = math.ceil(job.timesteps / (n_envs * entry["n_steps"]))
    callback = Evaluations(
        task, make_envs(name, task.n_episodes, EVALUATION_SEED, frozen), every=math.ceil(n_updates / N_EVALUATIONS)
    )
    env = make_envs(name, n_envs, job.seed, normalize)
    model = PPOExt(env=env, device="cpu", backend="eager", seed=job.seed, stats_window_size=20, **entry)
    model.learn(job.timesteps, callback=callback)
    return callback.rows


def cell(rows: list[Row], task: str, arm: str) -> str:
    if not select(rows, task=task, arm=arm):
        return "-"
    returns, gaussian = finals(rows, task, arm), finals(rows, task, "gaussian")
    text = mean_and_std(returns, digits=1)
    if arm == "gaussian":
        return text
    pairs = returns[:, None] > gaussian
    return f"{text} ({pairs.sum()}/{pairs.size})"


def report(rows: list[Row]) -> None:
    """Print the table as Markdown."""
    print("\nReturn at the end of the training, mean ± std over seeds (pairs of seeds in which it is above the Gaussian's)\n")
    print(f"| task | {' | '.join(COLORS)} |")
    print("|---" * (1 + len(COLORS)) + "|")
    for task in tasks_of(rows):
        print(f"| {task} | {' | '.join(cell(rows, task, arm) for arm in COLORS)} |")


def tasks_of(rows: list[Row]) -> list[str]:
    return [task for task in TASKS if select(rows, task=task)]


def plot(rows: list[Row]) -> Figure:
    figure, axes = grid_of_axes(len(tasks_of(rows)))
    for ax, task in zip(axes, tasks_of(rows), strict=True):
        for arm in arms(task):
            plot_curve(ax, select(rows, task=task, arm=arm), "evaluation", label=arm, color=COLORS[arm])
        ax.set(title=task, xlabel="1000 timesteps", ylabel="return")
    legend_below(figure, axes[0], n_columns=4)
    return figure


def main() -> None:
    arguments = parse_arguments(__doc__, timesteps=None, tasks=tuple(TASKS))
    path = arguments.out / "action_distributions.csv.gz"
    for task in arguments.tasks:
        run_task(run, task, TASKS[task].timesteps, arms(task), arguments, path)
    rows = read_csv(path)
    save_plot(plot(rows), arguments.out / "action_distributions.svg")
    report(rows)


if __name__ == "__main__":
    main()
