"""
Which changes of SB3's defaults with normalisation pay, on the cheap ones of all tasks on which `default` is developed
(scripts/default_split.py), for at most 100 thousand steps. The search of scripts/search_default.py had seen the first part of
them alone, and its choice did not carry over to the second one.

Each run has one task, random levels of all levers, and a seed of its own. Its score is the mean return of the deterministic
policy over ten episodes after 90 % and ten after 100 % of the steps, and its rank the share of the other runs of the task that
it beats. The effect of a level is the difference of mean ranks, with a 95 % interval from a bootstrap over the runs.

Run it: python benchmark/studies/default_screen.py (20 s a run; what is done is not repeated)
It needs the packages of benchmark/held-out.txt, and writes benchmark/studies/default_screen.csv.gz after each run.
"""

import argparse
import importlib
import itertools
import multiprocessing
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch as th
from common import Job, Row, parser_of, print_table, read_csv, select, write_csv
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.zoo.yaml_entries import can_be_normalized, is_scaled

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from default_split import DEVELOPMENT, MORE_DEVELOPMENT, is_discrete
from returns_suites import PACKAGES, POLICIES, of_package

# Slow ones
LEFT_OUT = {
    *("EnvPool/Boxing-v5", "EnvPool/CarRacing-v3", "EnvPool/MetaWorld.Reach-v3", "EnvPool/MetaWorld.DrawerClose-v3"),
    *("EnvPool/WalkerWalk-v1", "HopperBulletEnv-v0", "PyFlyt/QuadX-Hover-v1", "AdroitHandDoor-v1", "PandaReachDense-v3"),
    *("FlappyBird-v0", "EnvPool/Jumanji.Snake-v1"),
}
TASKS = {task: min(steps, 100_000) for task, steps in (DEVELOPMENT | MORE_DEVELOPMENT).items() if task not in LEFT_OUT}
KINDS = {kind: [task for task in TASKS if is_discrete(task) == (kind == "discrete")] for kind in ("continuous", "discrete")}
# The first level of each lever is SB3's default with `VecNormalize`.
LEVERS: dict[str, tuple[Any, ...]] = {
    "n_envs": (1, 8),
    "rollout": (2048, 1024),
    "normalize_freq": ("step", "rollout"),
    "advantage_norm": ("minibatch", "rollout"),
    "adaptive_lr_kl": ("none", 0.01),
    "net_type": ("mlp", "layer_norm"),
    "gamma": (0.99, "auto"),
    "betas": (0.999, 0.9),
    "ent_coef": (0.0, 0.01),
    "actions": ("gaussian", "narrow", "beta", "colored"),
}
OF_KIND = {"ent_coef": "discrete", "actions": "continuous"}
FIRST_SEED = 3000
RANDOM = "random levels"
# What is compared with more seeds: levels that differ from the first ones
_CONTINUOUS = {"n_envs": 8, "rollout": 1024, "normalize_freq": "rollout", "net_type": "layer_norm", "gamma": "auto"}
_DISCRETE = {"n_envs": 8, "normalize_freq": "rollout", "net_type": "layer_norm", "gamma": "auto"}
CHOSEN = {"continuous": "LayerNorm", "discrete": "LayerNorm, entropy"}
ARMS: dict[str, dict[str, Row]] = {
    "VecNormalize": {"continuous": {}, "discrete": {}},
    "LayerNorm": {"continuous": _CONTINUOUS, "discrete": _DISCRETE},
    "LayerNorm, KL": {
        "continuous": {**_CONTINUOUS, "adaptive_lr_kl": 0.01},
        "discrete": {**_DISCRETE, "adaptive_lr_kl": 0.01},
    },
    "LayerNorm, entropy": {"discrete": {**_DISCRETE, "ent_coef": 0.01}},
    "LayerNorm, rollout": {"continuous": {**_CONTINUOUS, "rollout": 2048}, "discrete": {**_DISCRETE, "rollout": 1024}},
}


def sample(kind: str, number: int) -> Row:
    """:return: A level of each lever; those of the other kind of actions have their first one"""
    rng = np.random.default_rng([FIRST_SEED, number, kind == "discrete"])
    drawn = {name: levels[rng.integers(len(levels))] for name, levels in LEVERS.items()}
    return drawn | {name: LEVERS[name][0] for name, of_kind in OF_KIND.items() if of_kind != kind}


def arguments_of(levels: Row, space: spaces.Space) -> dict[str, Any]:
    """:return: Arguments of the model"""
    policy_kwargs: dict[str, Any] = {"optimizer_kwargs": {"betas": (0.9, levels["betas"]), "eps": 1e-5}}
    policy_kwargs |= {"net_type": levels["net_type"]}
    policy_kwargs |= {"log_std_init": -0.5} if levels["actions"] == "narrow" else {}
    return {
        "n_steps": levels["rollout"] // levels["n_envs"],
        "normalize_obs": isinstance(space, spaces.Dict) or (can_be_normalized(space) and not is_scaled(space)),
        "normalize_reward": True,
        **{name: levels[name] for name in ("normalize_freq", "advantage_norm", "gamma", "ent_coef")},
        **({} if levels["adaptive_lr_kl"] == "none" else {"adaptive_lr_kl": levels["adaptive_lr_kl"]}),
        **({"action_dist": "beta"} if levels["actions"] == "beta" else {}),
        **({"noise_color": 0.5} if levels["actions"] == "colored" else {}),
        "policy_kwargs": policy_kwargs,
    }


def run(job: Job) -> Row:
    task, levels = job.settings["task"], {name: job.settings[name] for name in LEVERS}
    package = of_package(task, PACKAGES)
    if package is not None:
        importlib.import_module(package)
    start = time.process_time()
    env = make_vec_env(task, n_envs=levels["n_envs"], seed=job.seed)
    arguments = arguments_of(levels, env.observation_space)
    model = PPOExt(POLICIES.get(task, "MlpPolicy"), env, seed=job.seed, device="cpu", **arguments)
    tests, scores = make_vec_env(task, n_envs=10, seed=job.seed + 10_000), []
    for part in (0.9, 0.1):
        model.learn(int(part * job.timesteps), reset_num_timesteps=False)
        scores.append(evaluate_policy(model, tests, n_eval_episodes=10)[0])
    cpu_seconds = time.process_time() - start
    return {**job.settings, "seed": job.seed, "score": float(np.mean(scores)), "cpu_seconds": cpu_seconds}


def main() -> None:
    parser = parser_of(__doc__, timesteps=None, seeds=2, kinds=tuple(KINDS), tasks=tuple(TASKS), arms=tuple(ARMS))
    parser.add_argument("--runs", type=int, default=100, help="number of random runs of each kind (default: 100)")
    arguments = parser.parse_args()
    path = arguments.out / "default_screen.csv.gz"
    rows = read_csv(path)
    listed = [job for job in (*screened(arguments), *compared(arguments)) if job.settings["task"] in arguments.tasks]
    jobs = [job for job in listed if not select(rows, **{name: job.settings[name] for name in ("task", "arm")}, seed=job.seed)]
    with multiprocessing.get_context("spawn").Pool(arguments.processes, partial(th.set_num_threads, 1)) as pool:
        for done in pool.imap_unordered(run, jobs):
            rows = sorted([*rows, done], key=lambda row: (list(TASKS).index(row["task"]), row["arm"], row["seed"]))
            write_csv(path, rows)
            print(done["task"], done["arm"], done["seed"], round(done["score"], 2), round(done["cpu_seconds"]), flush=True)
    print_table("difference of mean ranks to the first level", ["lever", "level", *KINDS], effects(rows))
    print_table("share of pairs of runs better than `VecNormalize`", ["arm", *KINDS], shares(rows))


def screened(arguments: argparse.Namespace) -> Iterator[Job]:
    """:return: Runs with random levels, on the tasks in turns"""
    for number in range(arguments.runs):
        for kind in arguments.kinds:
            task = KINDS[kind][number % len(KINDS[kind])]
            yield Job({"task": task, "arm": RANDOM, **sample(kind, number)}, FIRST_SEED + number, steps(task, arguments))


def compared(arguments: argparse.Namespace) -> Iterator[Job]:
    """:return: Runs of the arms, seed after seed"""
    for number in range(arguments.seeds):
        pairs = [(kind, task) for kind in arguments.kinds for task in KINDS[kind]]
        for (kind, task), arm in itertools.product(pairs, arguments.arms):
            if kind not in ARMS[arm]:
                continue
            levels = {name: levels[0] for name, levels in LEVERS.items()} | ARMS[arm][kind]
            yield Job({"task": task, "arm": arm, **levels}, FIRST_SEED + 1000 + number, steps(task, arguments))


def steps(task: str, arguments: argparse.Namespace) -> int:
    """:return: Number of steps of a run"""
    return min(TASKS[task], arguments.timesteps or TASKS[task])


def effects(rows: list[Row]) -> list[list[str]]:
    """:return: A line for each level but the first of each lever, with a cell for each kind of actions"""
    rows = select(rows, arm=RANDOM)
    scores = {task: np.array([row["score"] for row in select(rows, task=task)]) for task in TASKS}
    lines, rng = [], np.random.default_rng(0)
    for lever, (first, *others) in LEVERS.items():
        for level in others:
            cells = []
            for kind, tasks in KINDS.items():
                ranks: dict[str, np.ndarray] = {}
                for side in (first, level):
                    chosen = [row for row in rows if row["task"] in tasks and row[lever] == side]
                    ranks[str(side)] = np.array([rank(row["score"], scores[row["task"]]) for row in chosen])
                one, two = ranks[str(first)], ranks[str(level)]
                if OF_KIND.get(lever, kind) != kind or min(len(one), len(two)) < 2:
                    cells.append("-")
                    continue
                drawn = [rng.choice(two, len(two)).mean() - rng.choice(one, len(one)).mean() for _ in range(2000)]
                low, high = np.percentile(drawn, [2.5, 97.5])
                cells.append(f"{two.mean() - one.mean():+.2f} ({low:+.2f} to {high:+.2f}), {len(two)}")
            lines.append([lever, str(level), *cells])
    return lines


def shares(rows: list[Row]) -> list[list[str]]:
    """:return: A line for each arm but the first: the mean over the tasks, with a bootstrap within each task"""
    first, *others = ARMS
    lines, rng = [], np.random.default_rng(0)
    for arm in others:
        cells = []
        for tasks in KINDS.values():
            sides = [
                [np.array([row["score"] for row in select(rows, task=task, arm=side)]) for side in (arm, first)]
                for task in tasks
            ]
            pairs = [(ours, theirs) for ours, theirs in sides if len(ours) and len(theirs)]
            drawn = [
                np.mean([share(rng.choice(ours, len(ours)), rng.choice(theirs, len(theirs))) for ours, theirs in pairs])
                for _ in range(1000 if pairs else 0)
            ]
            low, high = np.percentile(drawn, [2.5, 97.5]) if drawn else (0, 0)
            mean = np.mean([share(*pair) for pair in pairs]) if pairs else np.nan
            cells.append(f"{mean:.2f} ({low:.2f} to {high:.2f}), {len(pairs)} tasks")
        lines.append([arm, *cells])
    return lines


def share(ours: np.ndarray, theirs: np.ndarray) -> float:
    """:return: Share of the pairs in which ours is better, where a tie counts a half"""
    differences = ours[:, None] - theirs
    return float(((differences > 0) + (differences == 0) / 2).mean())


def rank(score: float, scores: np.ndarray) -> float:
    """:return: Share of the other runs of the task that a run beats, where a tie counts a half"""
    others = len(scores) - 1
    return float(((scores < score).sum() + ((scores == score).sum() - 1) / 2) / others) if others else 0.5


if __name__ == "__main__":
    main()
