"""
Which policy solves partially observable tasks: PPO, PPO on stacked frames, RecurrentPPO (an LSTM), a transformer, or an LSTM,
GRU, MinGRU or LRU in PPOExt.

The tasks are two T-mazes and RepeatPrevious (see memory_tasks.py), and control tasks without velocities. In the control tasks,
PPO with and without stacked frames, RecurrentPPO and the recurrent networks use the hyperparameters that RL Zoo tuned for
RecurrentPPO, and the transformer uses its entry in ppo_ext.yml. In the other tasks, all use the same hyperparameters. In
further arms, actor and critic share a transformer, unless the entry says otherwise, and in two of these, Adam averages the
gradients with a decay rate of 0.95 or 0.98 instead of 0.9. The deterministic policy is evaluated.

Run it: python benchmark/studies/memory.py (hours on two cores, most of them for RecurrentPPO; it needs RL Zoo and sb3-contrib)
It writes benchmark/studies/memory.csv.gz after each task, and memory.svg. With `--tasks` and `--arms` it runs some of
them and keeps the rows of the others. `--times` measures the CPU time per step instead, with all arms in turns in one process,
first with the networks of the entries and then with those that each policy has by default, and `--lstm-times` that of
RecurrentPPO and of recurrent networks in PPOExt with the rollouts of the Zoo's entries.
"""

import importlib.util
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
import yaml
from common import (
    Job,
    Row,
    averaging_gradients,
    finals,
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
from memory_tasks import RepeatPrevious, TMaze
from sb3_contrib import RecurrentPPO
from stable_baselines3 import PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack, VecNormalize, sync_envs_normalization
from torch import nn

import sb3_ppo_ext
from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.zoo.yaml_entries import DEFAULTS_OF_RECURRENT_PPO

# The recurrent arms of PPOExt and their networks
RECURRENT = {"LSTM in PPOExt": "lstm", "GRU in PPOExt": "gru", "MinGRU in PPOExt": "mingru", "LRU in PPOExt": "lru"}
SHARED = dict(share_features_extractor=True)
# The arms with a transformer, and what is not the default of its policy. What an entry says takes precedence.
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "transformer": {},
    "shared transformer": SHARED,
    "shared transformer, momentum 0.95": {**SHARED, **averaging_gradients(0.95)},
    "shared transformer, momentum 0.98": {**SHARED, **averaging_gradients(0.98)},
}
ARMS = ("PPO", "PPO, frames", "RecurrentPPO", *TRANSFORMERS, *RECURRENT)
# The others are in the tables.
DRAWN = ("PPO", "PPO, frames", "RecurrentPPO", "transformer", "shared transformer", "GRU in PPOExt")
COLORS = dict(zip(DRAWN, ("0.6", "C1", "C2", "C0", "C5", "C4"), strict=True))
N_EVALUATIONS, EVALUATION_SEED = 10, 1000
# For the tasks that the Zoo does not have
OWN = dict(n_envs=8, n_steps=128, batch_size=256, n_epochs=10, learning_rate="lin_1e-3", gamma=0.99, ent_coef=0.01)
# The Zoo's network for its RecurrentPPO
LSTM = dict(
    lstm_hidden_size=64, enable_critic_lstm=True, ortho_init=False, activation_fn=nn.ReLU, net_arch=dict(pi=[64], vf=[64])
)


@dataclass(frozen=True)
class Task:
    """
    :param env: Factory of the environment, or its id in Gymnasium
    :param timesteps: Number of timesteps of a run
    :param n_frames: Number of frames for the arm with stacked frames
    :param transformer: ``policy_kwargs`` of the transformer, if no entry has them
    """

    env: Callable[..., gym.Env] | str
    timesteps: int
    n_frames: int = 4
    transformer: dict[str, Any] = field(default_factory=dict)


TASKS = {
    "T-maze 10": Task(partial(TMaze, 10), 100_000, 16, dict(context_length=16)),
    "T-maze 30": Task(partial(TMaze, 30), 200_000, 32, dict(context_length=32)),
    "RepeatPrevious": Task(RepeatPrevious, 100_000, 8, dict(context_length=8, n_stacked=1)),
    "CartPoleNoVel-v1": Task("CartPoleNoVel-v1", 100_000),
    "PendulumNoVel-v1": Task("PendulumNoVel-v1", 100_000),
    "MountainCarContinuousNoVel-v0": Task("MountainCarContinuousNoVel-v0", 300_000),
}


@cache
def entries(name: str) -> dict[str, dict[str, Any]]:
    """The entries of one of the Zoo's files, or of ours."""
    import rl_zoo3.import_envs  # noqa: F401  # registers the tasks without velocities

    if name == "ppo_ext":
        path = Path(sb3_ppo_ext.__file__).parent / "zoo" / "hyperparams" / "ppo_ext.yml"
    else:
        zoo = importlib.util.find_spec("rl_zoo3")
        assert zoo is not None
        assert zoo.origin is not None
        path = Path(zoo.origin).parent / "hyperparams" / f"{name}.yml"
    return yaml.safe_load(path.read_text())


def hyperparameters(task: str, arm: str) -> dict[str, Any]:
    entry = dict(entries("ppo_ext" if arm in TRANSFORMERS else "ppo_lstm").get(task, OWN))
    entry.pop("n_timesteps", None)
    policy_kwargs = evaluated(entry.pop("policy_kwargs", {}))
    if arm == "RecurrentPPO":
        entry |= {"policy": "MlpLstmPolicy", "policy_kwargs": policy_kwargs or LSTM}
    elif arm in RECURRENT:
        entry = {**DEFAULTS_OF_RECURRENT_PPO, **entry}
        entry |= {"policy": "MlpLstmPolicy", "policy_kwargs": {**(policy_kwargs or LSTM), "rnn": RECURRENT[arm]}}
    elif arm in TRANSFORMERS:
        policy_kwargs = {**TRANSFORMERS[arm], **(policy_kwargs or TASKS[task].transformer)}
        entry |= {"policy": "MlpTransformerPolicy", "policy_kwargs": policy_kwargs}
    else:
        kwargs = {name: value for name, value in policy_kwargs.items() if "lstm" not in name}
        entry |= {"policy": "MlpPolicy", "policy_kwargs": kwargs}
    for name in ("learning_rate", "clip_range"):
        if isinstance(entry.get(name), str) and arm not in TRANSFORMERS:
            entry[name] = linear(float(entry[name].removeprefix("lin_")))
    return entry


def evaluated(value: Any) -> Any:
    """What the Zoo takes the text of an entry for."""
    return eval(value, {"nn": nn, "dict": dict}) if isinstance(value, str) else value


def algorithm_of(arm: str) -> Any:
    return RecurrentPPO if arm == "RecurrentPPO" else PPOExt if arm in (*RECURRENT, *TRANSFORMERS) else PPO


def linear(start: float) -> Callable[[float], float]:
    return lambda progress: start * progress


def normalization(value: bool | dict[str, Any], gamma: float) -> dict[str, Any] | None:
    """Arguments of VecNormalize for an entry's value of ``normalize``, or None if it does not normalize."""
    return {"gamma": gamma, **(value if isinstance(value, dict) else {})} if value else None


def make_envs(task: Task, n_envs: int, seed: int, normalize: dict[str, Any] | None, n_frames: int | None) -> VecEnv:
    env = make_vec_env(task.env, n_envs, seed=seed)
    env = env if normalize is None else VecNormalize(env, **normalize)
    return env if n_frames is None else VecFrameStack(env, n_frames)


def make_model(name: str, arm: str, seed: int, n_eval: int | None = None) -> tuple[BaseAlgorithm, VecEnv]:
    """Make the model, and the environments to evaluate it in."""
    task, entry = TASKS[name], hyperparameters(name, arm)
    n_envs = entry.pop("n_envs", 1)
    normalize = normalization(evaluated(entry.pop("normalize", False)), entry.get("gamma", 0.99))
    frozen = None if normalize is None else {**normalize, "norm_reward": False, "training": False}
    n_frames = task.n_frames if arm == "PPO, frames" else None
    env = make_envs(task, n_envs, seed, normalize, n_frames)
    model = algorithm_of(arm)(env=env, seed=seed, device="cpu", **entry)
    return model, make_envs(task, n_eval or 10, EVALUATION_SEED, frozen, n_frames)


class Evaluations(BaseCallback):
    """
    Records the mean return of the deterministic policy over ten episodes, ten times in a run, and over forty at its end.

    :param env: The environments for the evaluation
    :param every: Number of steps of each environment between two evaluations
    """

    def __init__(self, env: VecEnv, every: int):
        super().__init__()
        self.env, self.every, self.rows = env, every, list[Row]()

    def _on_step(self) -> bool:
        if self.n_calls % self.every == 0:
            self._record(10)
        return True

    def _on_training_end(self) -> None:
        self._record(40)

    def _record(self, n_episodes: int) -> None:
        sync_envs_normalization(self.training_env, self.env)
        self.env.seed(EVALUATION_SEED)
        returns, _ = evaluate_policy(self.model, self.env, n_episodes, return_episode_rewards=True)
        assert isinstance(returns, list)
        if self.rows and self.rows[-1]["timesteps"] == self.num_timesteps:
            del self.rows[-1]
        self.rows.append({"timesteps": self.num_timesteps, "evaluation": float(np.mean(returns))})


def run(job: Job) -> list[Row]:
    model, env = make_model(job.settings["task"], job.settings["arm"], job.seed)
    callback = Evaluations(env, math.ceil(job.timesteps / N_EVALUATIONS / model.n_envs))
    start = time.process_time()
    model.learn(job.timesteps, callback=callback)
    callback.rows[-1]["cpu_seconds"] = time.process_time() - start
    return callback.rows


def report(rows: list[Row]) -> None:
    """Print the table as Markdown."""
    print("\nReturn at the end of the training, mean ± std over seeds\n")
    print(f"| task | {' | '.join(ARMS)} |\n|---" + "|---" * len(ARMS) + "|")
    for task in tasks_of(rows):
        cells = [mean_and_std(finals(rows, task, arm)) if select(rows, task=task, arm=arm) else "-" for arm in ARMS]
        print(f"| {task} | {' | '.join(cells)} |")


def tasks_of(rows: list[Row]) -> list[str]:
    return [task for task in TASKS if select(rows, task=task)]


def plot(rows: list[Row]) -> Figure:
    figure, axes = grid_of_axes(len(tasks_of(rows)))
    for ax, task in zip(axes, tasks_of(rows), strict=True):
        for arm in DRAWN:
            kind = select(rows, task=task, arm=arm)
            if kind:
                plot_curve(ax, kind, "evaluation", label=arm, color=COLORS[arm])
        ax.set(title=task, xlabel="1000 timesteps", ylabel="return")
    with_all_arms = max(axes, key=lambda ax: len(ax.get_legend_handles_labels()[1]))
    legend_below(figure, with_all_arms)
    return figure


def measure_times(task: str = "CartPoleNoVel-v1", n_rounds: int = 7) -> None:
    """Print the CPU time per step. All arms train with 8 x 128 steps, batches of 128 and 10 epochs."""
    loop = dict(n_steps=128, batch_size=128, n_epochs=10)
    # The other transformers compute the same as the shared one.
    arms = [arm for arm in ARMS if "momentum" not in arm]
    for networks in ("networks of the entries", "default networks"):
        models, times = {}, {arm: list[float]() for arm in arms}
        for arm in arms:
            entry = hyperparameters(task, arm)
            policy_kwargs = entry["policy_kwargs"] if networks == "networks of the entries" else default_networks(arm)
            env = make_envs(TASKS[task], 8, 0, None, 4 if arm == "PPO, frames" else None)
            models[arm] = algorithm_of(arm)(entry["policy"], env, policy_kwargs=policy_kwargs, device="cpu", **loop)
        for _ in range(n_rounds + 1):
            for arm, model in models.items():
                start = time.process_time()
                model.learn(1024, reset_num_timesteps=False)
                times[arm].append((time.process_time() - start) / 1.024)
        reference = np.array(times["RecurrentPPO"][1:])
        lines = [
            [arm, f"{1000 * np.median(of[1:]):.0f}", f"{np.median(reference / np.array(of[1:])):.1f}"]
            for arm, of in times.items()
        ]
        print_table(f"{task}, {networks}, ms per 1000 steps", ["", "ms", "speed-up over RecurrentPPO"], lines)


def default_networks(arm: str) -> dict[str, Any]:
    """``policy_kwargs`` with the default networks of an arm."""
    return {"rnn": RECURRENT[arm]} if arm in RECURRENT else TRANSFORMERS.get(arm, {})


def measure_lstm_times(n_rounds: int = 5) -> None:
    """Print the CPU time per step with the networks and rollouts of the Zoo's entries for RecurrentPPO."""
    lines = []
    for task in ("CartPoleNoVel-v1", "PendulumNoVel-v1", "MountainCarContinuousNoVel-v0"):
        models = {arm: make_model(task, arm, seed=0, n_eval=1)[0] for arm in ("RecurrentPPO", *RECURRENT)}
        times: dict[str, list[float]] = {arm: [] for arm in models}
        for _ in range(n_rounds + 1):
            for arm, model in models.items():
                timesteps = max(model.n_steps * model.n_envs, 1024)  # type: ignore[attr-defined]
                start = time.process_time()
                model.learn(timesteps, reset_num_timesteps=False)
                times[arm].append(1e6 * (time.process_time() - start) / timesteps)
        reference = np.array(times["RecurrentPPO"][1:])
        for arm, of in times.items():
            lines.append([task, arm, f"{np.median(of[1:]):.0f}", f"{np.median(reference / np.array(of[1:])):.1f}"])
    print_table("ms per 1000 steps", ["", "", "ms", "speed-up over RecurrentPPO"], lines)


def main() -> None:
    if "--lstm-times" in sys.argv:
        th.set_num_threads(1)
        measure_lstm_times()
        return
    if "--times" in sys.argv:
        th.set_num_threads(1)
        measure_times()
        return
    arguments = parse_arguments(__doc__, timesteps=None, seeds=3, tasks=tuple(TASKS), arms=ARMS)
    path = arguments.out / "memory.csv.gz"
    for task in arguments.tasks:
        run_task(run, task, TASKS[task].timesteps, arguments.arms, arguments, path)
    rows = read_csv(path)
    save_plot(plot(rows), arguments.out / "memory.svg")
    report(rows)


if __name__ == "__main__":
    main()
