"""
How well the transformer recalls with everything at its default, on four tasks whose sizes and seeds chose nothing: what is to
be answered in the last step of an episode depends on a combination of what was seen before, and on nothing else.

- "asked": three symbols are shown in a random order, each with a sign; the last step asks for the sign of one of them
- "order": two events come one after the other; which was the first?
- "count": a pulse comes between zero and four times; how often?
- "pair": two cues have one of three values each; are they the same?

Each of them with a KL divergence that is held, as in robustness.py, and with two constant learning rates. "frames" is PPO on
stacked observations of whole episodes. A run ends when 99 % of the last thousand answers are right. Seeds begin at 200.

Run it: python benchmark/studies/recall.py
It writes benchmark/studies/recall.csv.gz after each run; runs that are in the table are not repeated. `--report` runs nothing.
"""

import argparse
import itertools
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch as th
from common import BatchedEnv, Job, Row, parser_of, print_table, read_csv, select, write_csv
from gymnasium import spaces
from robustness import HELD
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecFrameStack

from sb3_ppo_ext import PPOExt

# What is to be remembered lies in the first ``SHOWN`` steps; the answer is due in the last one.
LENGTH, SHOWN = 16, 10
# Observations of some episodes, shape ``(n_episodes, LENGTH, n_features)``, and their answers, shape ``(n_episodes,)``
Episodes = tuple[np.ndarray, np.ndarray]


def asked(rng: np.random.Generator, n_episodes: int) -> Episodes:
    episodes, n_symbols = np.arange(n_episodes), 3
    seen = np.zeros((n_episodes, LENGTH, 2 * n_symbols), np.float32)
    signs, steps = rng.integers(2, size=(n_episodes, n_symbols)), _different_steps(rng, n_episodes, n_symbols)
    for symbol in range(n_symbols):
        seen[episodes, steps[:, symbol], symbol] = 2 * signs[:, symbol] - 1
    question = rng.integers(n_symbols, size=n_episodes)
    seen[episodes, -1, n_symbols + question] = 1
    return seen, signs[episodes, question]


def order(rng: np.random.Generator, n_episodes: int) -> Episodes:
    seen, steps = np.zeros((n_episodes, LENGTH, 3), np.float32), _different_steps(rng, n_episodes, 2)
    for event in range(2):
        seen[np.arange(n_episodes), steps[:, event], event] = 1
    seen[:, -1, 2] = 1
    return seen, np.argmin(steps, axis=1)


def count(rng: np.random.Generator, n_episodes: int) -> Episodes:
    seen, counts = np.zeros((n_episodes, LENGTH, 2), np.float32), rng.integers(5, size=n_episodes)
    seen[:, :SHOWN, 0] = _different_steps(rng, n_episodes, SHOWN) < counts[:, None]
    seen[:, -1, 1] = 1
    return seen, counts


def pair(rng: np.random.Generator, n_episodes: int) -> Episodes:
    seen, steps = np.zeros((n_episodes, LENGTH, 4), np.float32), _different_steps(rng, n_episodes, 2)
    same, first = rng.integers(2, size=n_episodes), rng.integers(3, size=n_episodes)
    second = (first + (1 - same) * rng.integers(1, 3, size=n_episodes)) % 3
    for step, value in zip(steps.T, (first, second), strict=True):
        seen[np.arange(n_episodes), step, value] = 1
    seen[:, -1, 3] = 1
    return seen, same


def _different_steps(rng: np.random.Generator, n_episodes: int, n_steps: int) -> np.ndarray:
    """Different ones of the first steps in a random order, shape ``(n_episodes, n_steps)``."""
    return rng.permuted(np.tile(np.arange(SHOWN), (n_episodes, 1)), axis=1)[:, :n_steps]


# Each with its number of answers
TASKS: dict[str, tuple[Callable[[np.random.Generator, int], Episodes], int]] = {
    "asked": (asked, 2),
    "order": (order, 2),
    "count": (count, 5),
    "pair": (pair, 2),
}
ARMS = "transformer", "frames"
RATES: dict[str, dict[str, Any]] = {
    "held KL": HELD,
    "constant 3e-4": {"learning_rate": 3e-4},
    "constant 1e-3": {"learning_rate": 1e-3},
}
OPTIONS: dict[str, Any] = dict(n_steps=128, batch_size=256, device="cpu")
N_ENVS, TIMESTEPS, FIRST_SEED, N_ANSWERS, ENOUGH = 16, 150_000, 200, 1000, 0.99


class Recall(BatchedEnv):
    """The reward of a guess is 0 on average, and that of the right answer 1. The score is whether it was right."""

    def __init__(self, task: str, n_envs: int, seed: int):
        self.draw, self.n_answers = TASKS[task]
        n_features = self.draw(np.random.default_rng(), 1)[0].shape[2]
        space = spaces.Box(-1.0, 1.0, (n_features,), np.float32)
        super().__init__(n_envs, space, spaces.Discrete(self.n_answers), LENGTH, seed)
        # With what is seen after the end, which is nothing
        self.seen, self.answers = np.zeros((n_envs, LENGTH + 1, n_features), np.float32), np.zeros(n_envs, int)

    def begin(self, which: np.ndarray) -> None:
        self.seen[which, :LENGTH], self.answers[which] = self.draw(self.rng, int(which.sum()))

    def observe(self) -> np.ndarray:
        return self.seen[np.arange(self.num_envs), self.lengths]

    def act(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        last, right = self.lengths == LENGTH - 1, actions == self.answers
        return last * np.where(right, 1.0, -1 / (self.n_answers - 1)), last * right, last


class Answers(BaseCallback):
    """Ends the training when enough of the last answers are right."""

    def __init__(self) -> None:
        super().__init__()
        self.last: deque[float] = deque(maxlen=N_ANSWERS)

    def _on_step(self) -> bool:
        self.last.extend(info["episode"]["r"] for info in self.locals["infos"] if "episode" in info)
        return len(self.last) < N_ANSWERS or self.right < ENOUGH

    @property
    def right(self) -> float:
        return float(np.mean(self.last))


def make_model(task: str, arm: str, rate: str, seed: int) -> PPOExt:
    env, options = Recall(task, N_ENVS, seed), {**OPTIONS, **RATES[rate], "seed": seed}
    if arm == "frames":
        return PPOExt("MlpPolicy", VecFrameStack(env, LENGTH), **options)
    return PPOExt("MlpTransformerPolicy", env, **options)


def run(job: Job) -> Row:
    model, answers, start = make_model(**job.settings, seed=job.seed), Answers(), time.process_time()
    model.learn(job.timesteps, callback=answers)
    measured = {"timesteps": model.num_timesteps, "right": answers.right, "cpu_seconds": time.process_time() - start}
    return {**job.settings, "seed": job.seed, **measured}


def jobs_of(arguments: argparse.Namespace, rows: list[Row]) -> Iterator[Job]:
    """Runs that are not in the table, the first seed of all of them first."""
    seeds = range(FIRST_SEED, FIRST_SEED + arguments.seeds)
    for seed, arm, rate, task in itertools.product(seeds, arguments.arms, arguments.rates, arguments.tasks):
        settings = {"task": task, "arm": arm, "rate": rate}
        if not select(rows, **settings, seed=seed):
            yield Job(settings, seed, arguments.timesteps)


def report(rows: list[Row], arguments: argparse.Namespace) -> None:
    for arm in arguments.arms:
        lines = [[task, *(cell(select(rows, arm=arm, task=task, rate=rate)) for rate in arguments.rates)] for task in TASKS]
        print_table(
            f"{arm}: share of right answers at the end of each run (thousand steps)", ["task", *arguments.rates], lines
        )


def cell(runs: list[Row]) -> str:
    return ", ".join(f"{row['right']:.2f} ({row['timesteps'] / 1000:.0f})" for row in runs) or "-"


def main() -> None:
    parser = parser_of(__doc__, timesteps=TIMESTEPS, seeds=2, tasks=tuple(TASKS), arms=ARMS, rates=tuple(RATES))
    parser.add_argument("--report", action="store_true", help="print the table of the runs that there are")
    arguments = parser.parse_args()
    path = arguments.out / "recall.csv.gz"
    rows = read_csv(path)
    jobs = [] if arguments.report else list(jobs_of(arguments, rows))
    with multiprocessing.get_context("spawn").Pool(arguments.processes, partial(th.set_num_threads, 1)) as pool:
        for n_done, done in enumerate(pool.imap_unordered(run, jobs), start=1):
            rows = sorted(
                [*rows, done], key=lambda row: (row["arm"], list(TASKS).index(row["task"]), row["rate"], row["seed"])
            )
            write_csv(path, rows)
            print(f"{n_done} of {len(jobs)} runs: {done}", flush=True)
    report(rows, arguments)


if __name__ == "__main__":
    main()
