"""
What mirror symmetry, smooth actions and intrinsic rewards are worth.

- Pendulum, symmetry: the mirror loss and the augmentation by mirrored samples. ``error`` is the mean distance of the mean
  action from the mirror image of that for the mirrored observation, in units of the torque.
- Mass, smoothness: a mass is pushed to the middle and seen with noise; with and without the losses of CAPS. ``error`` is the
  mean change of the mean action from step to step, within the bounds -1 and 1.
- MountainCar, sparse: the reward is 1 at the goal and 0 elsewhere; with and without the intrinsic reward of RND. ``error`` is
  the fraction of episodes that do not reach the goal.

At the end, each policy is evaluated without exploration.

Run it: python benchmark/studies/auxiliary_losses.py (about five minutes on two cores)
It writes benchmark/studies/auxiliary_losses.csv.gz and benchmark/studies/auxiliary_losses.svg.
"""

from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from common import (
    BAND,
    BatchedEnv,
    Job,
    Recorder,
    Row,
    grid_of_axes,
    mean_and_std,
    parse_arguments,
    plot_curve,
    print_table,
    read_csv,
    run_task,
    save_plot,
    select,
)
from gymnasium import spaces
from matplotlib.figure import Figure
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from sb3_ppo_ext import FastDummyVecEnv, PPOExt, RNDReward

MIRROR = {"obs": [0, [1, -1], [2, -1]], "action": [[0, -1]]}
SYMMETRY, SMOOTHNESS, EXPLORATION = "Pendulum, symmetry", "Mass, smoothness", "MountainCar, sparse"
# Options of each arm, by task; those of the exploration are the arguments of `RNDReward`
TASKS: dict[str, dict[str, Any]] = {
    SYMMETRY: {
        "plain": None,
        "mirror 0.1": {"mirror": {"coef": 0.1, **MIRROR}},
        "mirror 1": {"mirror": {"coef": 1.0, **MIRROR}},
        "augmentation": {"mirror_augmentation": {"coef": 1.0, **MIRROR}},
    },
    SMOOTHNESS: {
        "plain": None,
        "temporal 0.1": {"caps_temporal": 0.1},
        "temporal 0.3": {"caps_temporal": 0.3},
        "spatial 0.1": {"caps_spatial": {"coef": 0.1, "std": 0.1}},
        "spatial 0.3": {"caps_spatial": {"coef": 0.3, "std": 0.1}},
    },
    EXPLORATION: {"plain": None, "RND 0.02": {"coef": 0.02}, "RND 0.1": {"coef": 0.1}},
}
TIMESTEPS = {SYMMETRY: 50_000, SMOOTHNESS: 50_000, EXPLORATION: 150_000}
SHORT: dict[str, Any] = dict(n_steps=256, batch_size=128, gamma=0.9, learning_rate=1e-3)
MOUNTAIN_CAR: dict[str, Any] = dict(n_steps=128, batch_size=256, n_epochs=4, gamma=0.99, gae_lambda=0.98, learning_rate=1e-3)


class SparseReward(gym.RewardWrapper):
    """MountainCar's reward is -1 at each step; here it is 1 for the step that reaches the goal."""

    def reward(self, reward: Any) -> float:
        position: Any = self.unwrapped
        return float(position.state[0] >= position.goal_position)


class NoisyMass(BatchedEnv):
    """A mass on a line with a force from -1 to 1, whose position and velocity are seen with noise."""

    NOISE, STEP = 0.1, 0.1

    def __init__(self, n_envs: int, seed: int):
        space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        super().__init__(n_envs, space, spaces.Box(-1.0, 1.0, (1,), np.float32), 100, seed)
        self.state = np.zeros((n_envs, 2))

    def begin(self, which: np.ndarray) -> None:
        self.state[which] = self.rng.uniform(-1, 1, (int(which.sum()), 2)) * [2.0, 0.0]

    def observe(self) -> np.ndarray:
        return np.float32(self.state + self.NOISE * self.rng.standard_normal(self.state.shape))

    def act(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self.state[:, 1] += self.STEP * 2 * actions[:, 0]
        self.state[:, 0] += self.STEP * self.state[:, 1]
        rewards = -np.abs(self.state[:, 0])
        return rewards, rewards, np.zeros(self.num_envs, bool)


def make_env(task: str, n_envs: int, seed: int) -> VecEnv:
    if task == SMOOTHNESS:
        return NoisyMass(n_envs, seed)
    if task == SYMMETRY:
        return make_vec_env("Pendulum-v1", n_envs, seed=seed, vec_env_cls=FastDummyVecEnv)
    return make_vec_env("MountainCar-v0", n_envs, seed=seed, wrapper_class=SparseReward, vec_env_cls=FastDummyVecEnv)


def run(job: Job) -> list[Row]:
    """Train one model, and evaluate it."""
    task, given = job.settings["task"], TASKS[job.settings["task"]][job.settings["arm"]]
    is_exploration = task == EXPLORATION
    env = make_env(task, 16 if is_exploration else 8, job.seed)
    if is_exploration and given is not None:
        env = RNDReward(env, **given, seed=job.seed)
    if is_exploration:
        env = VecNormalize(env, norm_reward=False)
    losses = None if is_exploration else given
    options = MOUNTAIN_CAR if is_exploration else SHORT
    model = PPOExt("MlpPolicy", env, seed=job.seed, device="cpu", auxiliary_losses=losses, **options)
    recorder = Recorder({})
    model.learn(job.timesteps, callback=recorder)
    evaluation, error = evaluated(model, task, job.seed)
    # Before the first time limit, episodes have ended in some runs alone.
    rows = [row for row in recorder.rows if row["timesteps"] >= 200 * env.num_envs]
    return [{**row, "evaluation": evaluation, "error": error} for row in rows]


def evaluated(model: PPOExt, task: str, seed: int) -> tuple[float, float]:
    """Mean return of 16 episodes without exploration, of 200 steps or until their end, and the error of the task."""
    env = make_env(task, 16, 1000 + seed)
    observations: Any = env.reset()
    returns, running, errors = np.zeros(16), np.ones(16, bool), []
    normalizer, before = model.get_vec_normalize_env(), None
    for _ in range(200):
        observations = observations if normalizer is None else normalizer.normalize_obs(observations)
        actions = mean_actions(model, observations)
        if task == SYMMETRY:
            errors.append(np.abs(actions + mean_actions(model, observations * np.array([1, -1, -1], np.float32))).mean())
        elif task == SMOOTHNESS and before is not None:
            errors.append(np.abs(actions - before).mean())
        before = actions
        observations, rewards, dones, _ = env.step(model.predict(observations, deterministic=True)[0])
        returns += rewards * running
        running &= ~dones
    error = np.mean(returns == 0) if task == EXPLORATION else np.mean(errors)
    return float(returns.mean()), float(error)


def mean_actions(model: PPOExt, observations: Any) -> np.ndarray:
    """Mean actions within the bounds; probabilities of discrete ones."""
    with th.no_grad():
        distribution: Any = model.policy.get_distribution(model.policy.obs_to_tensor(observations)[0]).distribution
    space: Any = model.action_space
    is_gaussian = hasattr(distribution, "loc")
    return np.clip(distribution.mean.numpy(), space.low, space.high) if is_gaussian else distribution.probs.numpy()


def as_typed(arm: str) -> str:
    """:return: Name of an arm in the plot, with the key of ``auxiliary_losses`` or the wrapper that is typed for it"""
    names = {"temporal": "caps_temporal", "spatial": "caps_spatial", "augmentation": "mirror_augmentation", "RND": "RNDReward"}
    kind, _, coefficient = arm.partition(" ")
    return f"{names.get(kind, kind)} {coefficient}".strip()


def plot(rows: list[Row]) -> Figure:
    figure, axes = grid_of_axes(len(TASKS))
    for ax, (task, arms) in zip(axes, TASKS.items(), strict=True):
        for arm in arms:
            if of_arm := select(rows, task=task, arm=arm):
                plot_curve(ax, of_arm, "return", label=as_typed(arm))
        ax.set(title=task, xlabel="1000 timesteps", ylabel="return")
        ax.legend(fontsize=7)
    figure.supxlabel(BAND, fontsize=8)
    return figure


def main() -> None:
    arguments = parse_arguments(__doc__, timesteps=None, tasks=list(TASKS))
    path = arguments.out / "auxiliary_losses.csv.gz"
    for task in arguments.tasks:
        run_task(run, task, TIMESTEPS[task], list(TASKS[task]), arguments, path)
    rows = read_csv(path)
    for task in arguments.tasks:
        lines = []
        for arm in TASKS[task]:
            last = list({row["seed"]: row for row in select(rows, task=task, arm=arm)}.values())
            evaluation, error = (np.array([row[name] for row in last]) for name in ("evaluation", "error"))
            lines.append([arm, mean_and_std(evaluation), mean_and_std(error, 3)])
        print_table(f"{task}: return and error of the evaluation, mean ± std over seeds", ["", "return", "error"], lines)
    save_plot(plot(rows), arguments.out / "auxiliary_losses.svg")


if __name__ == "__main__":
    main()
