"""
How the transformer learns on eight partially observable tasks where nobody tuned it, next to PPO on stacked frames,
RecurrentPPO, a transformer that actor and critic share ("shared transformer"), and shared ones without attention sinks and
with heavier ones, and to a MinGRU and an LRU. All of them train with the same hyperparameters and three learning rates, and
with their default networks.
In further arms, `adaptive_lr_kl=0.01` adapts the learning rate, beginning with each of the three, also to a KL divergence
that falls linearly to zero ("falling KL": from 0.01; "small" and "large": from 0.005 and 0.02). In others, the learning rate
itself falls linearly to zero, `target_kl=0.03` ends updates early, or Adam averages the gradients with a decay rate of 0.95
or 0.98 instead of 0.9. RecurrentPPO is computed by PPOExt, which is equal but for rounding, in less time; "RecurrentPPO,
falling KL" is what it would be with that option of PPOExt. What falls reaches zero after 400 thousand steps, so that a
shorter run is the beginning of a longer one; "short" ones reach zero after 100 thousand steps, with which the run ends.
"short proportional KL" is "short falling KL" with `adaptive_lr_rule="proportional"`, and "held KL" also has a KL divergence
that only falls in the second half, `adaptive_lr_kl="hold_0.01"`.

The score is the mean return of the episodes in the last 20 thousand steps of the training, or of its first 100 thousand. Seeds
begin at 100: runs with seeds 0 and 1 of five of the tasks took part in the search for the cause (see held_back.py).

Run it: python benchmark/studies/robustness.py --arms transformer frames --timesteps 100000
It writes benchmark/studies/robustness.csv.gz after each run, and robustness.svg. Runs that are in the table are not
repeated, unless they are shorter, so that a study of many hours can be made in parts; `--report` runs nothing. What is printed
are the runs of the arms, tasks, learning rates and the number of seeds that are given, by default all of them and five seeds.
"""

import argparse
import itertools
import math
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from common import (
    Job,
    Row,
    averaging_gradients,
    grid_of_axes,
    legend_below,
    mean_and_std,
    parser_of,
    print_table,
    read_csv,
    save_plot,
    select,
    write_csv,
)
from matplotlib.figure import Figure
from memory_tasks import (
    Bandit,
    Counting,
    HigherLower,
    RepeatPrevious,
    delayed_pendulum,
    noisy_cart_pole,
    pendulum_positions,
)
from sb3_contrib import RecurrentPPO
from scipy.stats import mannwhitneyu, trim_mean
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecFrameStack

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.memory.transformer import Block

TASKS: dict[str, Callable[[], gym.Env]] = {
    "noisy cart-pole": noisy_cart_pole,
    "pendulum positions": pendulum_positions,
    "delayed pendulum": delayed_pendulum,
    "counting": Counting,
    "recall 6": partial(RepeatPrevious, 6),
    "recall 51": partial(RepeatPrevious, 51, 53),
    "bandit": Bandit,
    "cards": HigherLower,
}
COLORS = {
    "transformer": "C0",
    "frames": "C1",
    "RecurrentPPO": "C2",
    "transformer, held KL": "C4",
}
# What falls in a run with such an option reaches zero after ``SHORT`` steps, in all others after ``LONG`` steps.
SHORT_RUN, SHORT_HELD, SHORT_PROPORTIONAL = SHORT_RUNS = "short falling KL", "short held KL", "short proportional KL"
HELD: dict[str, Any] = dict(adaptive_lr_kl="hold_0.01", adaptive_lr_rule="proportional")
# Options of an arm, by what its name ends with; the learning rate, ``rate``, is filled in.
OPTIONS_OF_ARMS: dict[str, dict[str, Any]] = {
    "adaptive rate": dict(adaptive_lr_kl=0.01),
    "falling KL": dict(adaptive_lr_kl="lin_0.01"),
    "small falling KL": dict(adaptive_lr_kl="lin_0.005"),
    "large falling KL": dict(adaptive_lr_kl="lin_0.02"),
    SHORT_RUN: dict(adaptive_lr_kl="lin_0.01"),
    SHORT_PROPORTIONAL: dict(adaptive_lr_kl="lin_0.01", adaptive_lr_rule="proportional"),
    "held KL": HELD,
    SHORT_HELD: HELD,
    "falling rate": dict(learning_rate="lin_{rate}"),
    "target KL": dict(target_kl=0.03),
    "momentum 0.95": dict(policy_kwargs=averaging_gradients(0.95)),
    "momentum 0.98": dict(policy_kwargs=averaging_gradients(0.98)),
}
SHARED = "shared transformer"
LINEAR_RNNS = {"MinGRU": "mingru", "LRU": "lru"}
OTHER_POLICIES = "frames", "RecurrentPPO"
ARMS = (*COLORS, f"transformer, {SHORT_RUN}", SHARED, *(f"{SHARED}, {name}" for name in OPTIONS_OF_ARMS))
ARMS += tuple(f"{policy}, {name}" for policy in ("transformer", *OTHER_POLICIES) for name in (SHORT_PROPORTIONAL, SHORT_HELD))
ARMS += tuple(f"{policy}, held KL" for policy in OTHER_POLICIES)
ARMS += ("transformer, falling KL", "frames, adaptive rate", "frames, falling KL", f"frames, {SHORT_RUN}")
ARMS += ("RecurrentPPO, falling KL", "RecurrentPPO, large falling KL", f"RecurrentPPO, {SHORT_RUN}")
ARMS += ("without sinks", "heavy sinks", *LINEAR_RNNS)
# Initial weights of the sinks in full contexts, where they are others than the default
SINKS = {"without sinks": 0.0, "heavy sinks": 1.0}
RATES = ("1e-4", "3e-4", "1e-3")
N_FRAMES = 8
OPTIONS: dict[str, Any] = dict(n_steps=128, batch_size=256, n_epochs=10, gamma=0.99, device="cpu")
SHORT, LONG, WINDOW, FIRST_SEED = 100_000, 400_000, 20_000, 100


def make_model(
    task: str, arm: str, rate: float, seed: int, recurrent_ppo: Any = RecurrentPPO, **options: Any
) -> BaseAlgorithm:
    env = make_vec_env(TASKS[task], 8, seed=seed)
    kwargs = {**OPTIONS, "learning_rate": rate, "seed": seed, **options}
    policy, _, option = arm.partition(", ")
    for name, value in OPTIONS_OF_ARMS.get(option, {}).items():
        kwargs[name] = value.format(rate=rate) if isinstance(value, str) else value
    if policy == "RecurrentPPO":
        return recurrent_ppo("MlpLstmPolicy", env, **kwargs)
    if policy in LINEAR_RNNS:
        return PPOExt("MlpLstmPolicy", env, policy_kwargs=dict(rnn=LINEAR_RNNS[policy]), **kwargs)
    if policy == "frames":
        return PPOExt("MlpPolicy", VecFrameStack(env, N_FRAMES), **kwargs)
    if policy in (SHARED, *SINKS):
        kwargs["policy_kwargs"] = {**kwargs.get("policy_kwargs", {}), "share_features_extractor": True}
    model = PPOExt("MlpTransformerPolicy", env, **kwargs)
    if policy in SINKS:
        set_sinks(model.policy.pi_transformer.layers, SINKS[policy])  # type: ignore[union-attr, arg-type]
    return model


def set_sinks(blocks: Iterable[Block], weight: float) -> None:
    """Let new sinks weigh as much as some full contexts; without any weight, they do not learn."""
    for block in blocks:
        with th.no_grad():
            block.sink_scores.add_(math.log(weight / block.SINK_WEIGHT) / block.SCORE_SCALE if weight else -math.inf)
        block.sink_scores.requires_grad_(weight > 0)


class Returns(BaseCallback):
    """
    Records the mean return of the episodes that ended in each period of ``WINDOW / 2`` steps, and ends the training
    after ``timesteps``.
    """

    def __init__(self, timesteps: int) -> None:
        super().__init__()
        self.timesteps = timesteps
        self.returns: dict[int, list[float]] = {}

    def _on_step(self) -> bool:
        period = -(-self.num_timesteps // (WINDOW // 2))
        for info in self.locals["infos"]:
            if "episode" in info:
                self.returns.setdefault(period, []).append(info["episode"]["r"])
        return self.num_timesteps < self.timesteps

    def rows(self) -> list[Row]:
        return [
            {"timesteps": period * WINDOW // 2, "return": float(np.mean(values))} for period, values in self.returns.items()
        ]


def length_of(job: Job) -> int:
    """Number of timesteps after which what falls reaches zero."""
    return max(job.timesteps, SHORT if job.settings["arm"].endswith(SHORT_RUNS) else LONG)


def run(job: Job) -> list[Row]:
    model = make_model(job.settings["task"], job.settings["arm"], float(job.settings["rate"]), job.seed, PPOExt)
    callback, start = Returns(job.timesteps), time.process_time()
    model.learn(length_of(job), callback=callback)
    rows = [{**job.settings, "seed": job.seed, **row} for row in callback.rows() if row["timesteps"] <= job.timesteps]
    rows[-1]["cpu_seconds"] = time.process_time() - start
    return rows


def jobs_of(arguments: argparse.Namespace, rows: list[Row]) -> Iterator[Job]:
    """Runs that are not in the table in this length, the first seed of all of them first."""
    length: dict[tuple, int] = {}
    for row in rows:
        length[_key(row)] = max(length.get(_key(row), 0), row["timesteps"])
    seeds = range(FIRST_SEED, FIRST_SEED + arguments.seeds)
    for seed, task, arm, rate in itertools.product(seeds, arguments.tasks, arguments.arms, arguments.rates):
        settings = {"task": task, "arm": arm, "rate": float(rate)}
        if length.get(_key({**settings, "seed": seed}), 0) < arguments.timesteps // (WINDOW // 2) * (WINDOW // 2):
            yield Job(settings, seed, arguments.timesteps)


def _key(row: Row) -> tuple:
    return tuple(row[name] for name in ("task", "arm", "rate", "seed"))


def score(rows: list[Row], end: int) -> float:
    """Mean return of a run in the last ``WINDOW`` steps up to ``end``."""
    return float(np.mean([row["return"] for row in rows if end - WINDOW < row["timesteps"] <= end]))


def runs_of(rows: list[Row], task: str, arm: str, rate: float, end: int) -> list[list[Row]]:
    """Rows of each seed that has been trained for so long."""
    kind = select(rows, task=task, arm=arm, rate=rate)
    runs = [select(kind, seed=seed) for seed in sorted({row["seed"] for row in kind})]
    return [each for each in runs if each[-1]["timesteps"] >= end]


def all_scores(rows: list[Row], arm: str, end: int) -> dict[tuple[str, float], np.ndarray]:
    """Scores of an arm by task and rate, where there are any."""
    kinds = [(task, float(rate)) for task in TASKS for rate in RATES]
    found = {(task, rate): [score(run, end) for run in runs_of(rows, task, arm, rate, end)] for task, rate in kinds}
    return {key: np.array(values) for key, values in found.items() if values}


def improvement(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Probability that one of our runs has a higher score than one of theirs; equal scores count half."""
    return float(mannwhitneyu(ours, theirs).statistic) / (len(ours) * len(theirs))


def report(rows: list[Row]) -> None:
    for end in sorted({SHORT, max(row["timesteps"] for row in rows)}):
        arms = {arm: all_scores(rows, arm, end) for arm in ARMS}
        arms = {arm: found for arm, found in arms.items() if found}
        lines = [
            [
                task,
                f"{rate:g}",
                *(mean_and_std(found[task, rate]) if (task, rate) in found else "-" for found in arms.values()),
            ]
            for task in TASKS
            for rate in map(float, RATES)
            if any((task, rate) in found for found in arms.values())
        ]
        print_table(f"Score after {end} steps, mean ± std over seeds", ["task", "learning rate", *arms], lines)
        for arm, found in arms.items():
            # Where nothing is learned, no rate is better.
            learned = [(np.mean(values), best_of(found, task)) for (task, _), values in found.items()]
            worst = min((mean / best for mean, best in learned if best > 0.1), default=np.nan)
            print(f"{arm}: IQM {iqm(found.values()):.3f}; lowest fraction of the best rate's score {worst:.2f}")
        for arm, rival in filter(are_compared, itertools.permutations(sorted(arms), 2)):
            shared = sorted(arms[arm].keys() & arms[rival].keys())
            ours, theirs = ([found[key] for key in shared] for found in (arms[arm], arms[rival]))
            better = np.mean([improvement(one, other) for one, other in zip(ours, theirs, strict=True)])
            print(f"{arm} and {rival}, where both were run: IQM {iqm(ours):.3f} and {iqm(theirs):.3f}; better: {better:.2f}")
    print_losses(rows)


def are_compared(arms: tuple[str, str]) -> bool:
    """Whether the second arm is one of the four policies, as it is or with the option of the first."""
    (policy, _, option), (rival, _, option_of_rival) = (arm.partition(", ") for arm in arms)
    plain = policy in OTHER_POLICIES and not option
    return rival in {*OTHER_POLICIES, "transformer", SHARED} and option_of_rival in {"", option} and not plain


def print_losses(rows: list[Row]) -> None:
    """Which runs of each arm have lost more than a tenth of the score that they had after ``SHORT`` steps."""
    end = max(row["timesteps"] for row in rows)
    for arm in ARMS if end > SHORT else ():
        kinds = [(task, float(rate)) for task in TASKS for rate in RATES]
        runs = [(f"{task} {rate:g}", run) for task, rate in kinds for run in runs_of(rows, task, arm, rate, end)]
        parts = [(name, score(run, end) / score(run, SHORT)) for name, run in runs if score(run, SHORT) > 0.1]
        lost = [f"{name}: {part:.2f}" for name, part in parts if part < 0.9]
        if parts:
            print(f"{arm}: {len(lost)} of {len(parts)} runs lost more than a tenth of their score. {', '.join(lost)}")


def iqm(values: Iterable[np.ndarray]) -> float:
    """Interquartile mean of the scores of all runs."""
    return float(trim_mean(np.concatenate(list(values)), 0.25))


def best_of(found: dict[tuple[str, float], np.ndarray], task: str) -> float:
    return max(float(np.mean(values)) for (other, _), values in found.items() if other == task)


def as_typed(arm: str) -> str:
    """:return: Name of an arm in the plot, with the value of ``adaptive_lr_kl`` that is typed for it"""
    return arm.replace("falling KL", "lin_0.01").replace("held KL", "hold_0.01")


def plot(rows: list[Row]) -> Figure:
    figure, axes = grid_of_axes(len(TASKS), sharex=True)
    for ax, task in zip(axes, TASKS, strict=True):
        for arm, color in COLORS.items():
            ends, of_rates = curves(rows, task, arm)
            ax.plot(ends / 1000, of_rates.mean(axis=0), color=color, label=as_typed(arm))
            ax.fill_between(ends / 1000, of_rates.min(axis=0), of_rates.max(axis=0), color=color, alpha=0.2, linewidth=0)
        ax.set(title=task, ylabel="return")
    for ax in axes[-2:]:
        ax.set_xlabel("1000 timesteps")
    legend_below(figure, axes[0], "means over seeds and three learning rates; bands: from the worst rate to the best")
    return figure


def curves(rows: list[Row], task: str, arm: str) -> tuple[np.ndarray, np.ndarray]:
    """Ends of the periods that there are of all learning rates, and the mean return of each rate in each of them."""
    kinds = [select(rows, task=task, arm=arm, rate=float(rate)) for rate in RATES]
    ends = sorted(set.intersection(*({row["timesteps"] for row in kind} for kind in kinds)))
    means = [[np.mean([row["return"] for row in kind if row["timesteps"] == end]) for end in ends] for kind in kinds]
    return np.array(ends), np.array(means)


def is_chosen(row: Row, arguments: argparse.Namespace) -> bool:
    is_kind = row["task"] in arguments.tasks and row["arm"] in arguments.arms
    return is_kind and row["rate"] in map(float, arguments.rates) and row["seed"] < FIRST_SEED + arguments.seeds


def main() -> None:
    parser = parser_of(__doc__, timesteps=LONG, seeds=5, tasks=tuple(TASKS), arms=ARMS, rates=RATES)
    parser.add_argument("--report", action="store_true", help="print the tables of the runs that there are")
    arguments = parser.parse_args()
    path = arguments.out / "robustness.csv.gz"
    rows = read_csv(path)
    jobs = [] if arguments.report else list(jobs_of(arguments, rows))
    with multiprocessing.get_context("spawn").Pool(arguments.processes, partial(th.set_num_threads, 1)) as pool:
        for n_done, done in enumerate(pool.imap_unordered(run, jobs), start=1):
            rows = [row for row in rows if _key(row) != _key(done[0])] + done
            write_csv(path, sorted(rows, key=lambda row: (list(TASKS).index(row["task"]), *_key(row)[1:], row["timesteps"])))
            print(f"{n_done} of {len(jobs)} runs: {_key(done[0])} {score(done, done[-1]['timesteps']):.2f}", flush=True)
    save_plot(plot(rows), arguments.out / "robustness.svg")
    chosen = [row for row in rows if is_chosen(row, arguments)]
    if chosen:
        report(chosen)
    else:
        print("The table has no such runs.")


if __name__ == "__main__":
    main()
