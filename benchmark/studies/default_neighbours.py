"""
Whether a hyperparameter near the entry `default` would be better, on cheap tasks of all three lists of
scripts/default_split.py, for at most 100 thousand steps. All of them are tasks of the development from here on.

Each run has one task, random levels of all levers, and a seed of its own. The first design looks for a more aggressive
default, the second one for a more careful one. A run's score is the mean return of the deterministic policy over ten episodes
after 90 % and ten after 100 % of the steps, and its rank the share of the other runs of the task, of both designs, that it
beats. The effects of all levels on the rank are estimated together by least squares.

Run it: python benchmark/studies/default_neighbours.py (20 s a run; what is done is not repeated)
It needs the packages of benchmark/held-out.txt, and writes benchmark/studies/default_neighbours.csv.gz after each run.
"""

import importlib
import multiprocessing
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch as th
from common import Job, Row, parse_arguments, print_table, read_csv, select, write_csv
from default_screen import rank
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecEnv
from torch import nn

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.zoo.yaml_entries import can_be_normalized, is_scaled

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from default_split import DEVELOPMENT, HELD_OUT, MORE_DEVELOPMENT, is_discrete
from returns_suites import PACKAGES, POLICIES, of_package

TASKS = {
    "continuous": (
        *("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Reacher-v5", "InvertedDoublePendulum-v5", "Pendulum-v1"),
        *("MountainCarContinuous-v0", "BipedalWalker-v3", "EnvPool/CartpoleSwingup-v1", "EnvPool/CheetahRun-v1"),
        *("EnvPool/FingerSpin-v1", "EnvPool/Parking-v0", "EnvPool/Racetrack-v0", "InvertedPendulumSwingupBulletEnv-v0"),
        *("ReacherBulletEnv-v0", "EnvPool/ReacherEasy-v1", "EnvPool/FishUpright-v1", "EnvPool/WalkerStand-v1"),
        *("EnvPool/PointMassEasy-v1", "EnvPool/BallInCupCatch-v1", "EnvPool/FingerTurnEasy-v1"),
        *("EnvPool/SwimmerSwimmer6-v1", "EnvPool/PointMaze_OpenDense-v3", "EnvPool/MyoSuite.myoElbowPose1D6MRandom-v0"),
        *("EnvPool/ParkingActionRepeat-v0", "EnvPool/RacetrackOval-v0"),
    ),
    "discrete": (
        *("CartPole-v1", "Acrobot-v1", "MountainCar-v0", "LunarLander-v3", "MinAtar/Breakout-v1", "MinAtar/SpaceInvaders-v1"),
        *("EnvPool/MiniGrid-DoorKey-5x5-v0", "EnvPool/Highway-v0", "EnvPool/Taxi-v3", "popgym-CountRecallEasy-v0"),
        *("popgym-MineSweeperEasy-v0", "EnvPool/MiniGrid-Fetch-5x5-N2-v0", "EnvPool/MiniGrid-LavaGapS5-v0"),
        *("EnvPool/BabyAI-GoToRedBallGrey-v0", "EnvPool/FrozenLake8x8-v1", "popgym-MultiarmedBanditEasy-v0"),
        "popgym-NoisyPositionOnlyCartPoleEasy-v0",
    ),
}
STEPS = {task: min(steps, 100_000) for task, steps in (DEVELOPMENT | MORE_DEVELOPMENT | HELD_OUT).items()}
LEFT_OUT = "LunarLander-v3"  # a minute a run, most of it evaluation
# The first level of each lever is that of `default`. A `rollout` is the data of an update, as a share of `default`'s.
DESIGNS: dict[str, dict[str, tuple[Any, ...]]] = {
    "aggressive": {
        "rollout": (1.0, 0.5),
        "learning_rate": (0.0003, 0.001, "lin_0.001"),
        "activation": ("tanh", "silu"),
        "critic": (64, 256),
        "gae_lambda": (0.95, 0.9),
        "batch_size": (64, 32),
        "n_epochs": (10, 20),
        "target_kl": ("none", 0.03),
        "clip_range": (0.2, 0.3),
        "normalize_value": (0, 1),
    },
    "careful": {
        "rollout": (1.0, 0.5),
        "learning_rate": (0.0003, "lin_0.0006"),
        "net_type": ("layer_norm", "simba"),
        "gae_lambda": (0.95, 0.98),
        "batch_size": (64, 128),
        "n_epochs": (10, 5),
        "target_kl": ("none", 0.03, 0.015),
        "clip_range": (0.2, 0.15),
        "vf_coef": (0.5, 1.0),
        "n_envs": (8, 4),
    },
}
FIRST_SEEDS = {"aggressive": 7000, "careful": 9000}
DEFAULTS: Row = {name: levels[0] for levers in reversed(DESIGNS.values()) for name, levels in levers.items()}


def sample(design: str, number: int) -> Row:
    """:return: A level of each lever; those of the other design have their first one"""
    rng = np.random.default_rng([FIRST_SEEDS[design], number])
    return DEFAULTS | {name: levels[rng.integers(len(levels))] for name, levels in DESIGNS[design].items()}


def jobs_of(design: str, runs: int, timesteps: int | None = None) -> Iterator[Job]:
    """:return: Runs on the tasks in turns, two with continuous actions and one with discrete ones"""
    continuous, discrete = TASKS.values()
    for number in range(runs):
        turn, last = divmod(number, 3)
        task = discrete[turn % len(discrete)] if last == 2 else continuous[(number - turn) % len(continuous)]
        if task != LEFT_OUT:
            seed = FIRST_SEEDS[design] + number
            steps = min(STEPS[task], timesteps or STEPS[task])
            yield Job({"design": design, "task": task, **sample(design, number)}, seed, steps)


def arguments_of(levels: Row, space: spaces.Space, discrete: bool) -> dict[str, Any]:
    """:return: Arguments of the model"""
    wide = levels["critic"] != DEFAULTS["critic"]
    return {
        "n_steps": int((2048 if discrete else 1024) * levels["rollout"]) // levels["n_envs"],
        "gamma": "auto",
        "ent_coef": 0.01 if discrete else 0.0,
        "normalize_obs": isinstance(space, spaces.Dict) or (can_be_normalized(space) and not is_scaled(space)),
        "normalize_reward": True,
        "normalize_freq": "rollout",
        "normalize_value": bool(levels["normalize_value"]),
        "target_kl": None if levels["target_kl"] == "none" else levels["target_kl"],
        **{name: levels[name] for name in ("learning_rate", "gae_lambda", "batch_size", "n_epochs", "clip_range", "vf_coef")},
        "policy_kwargs": {
            "net_type": levels["net_type"],
            **({"activation_fn": nn.SiLU} if levels["activation"] == "silu" else {}),
            **({"net_arch": dict(pi=[64, 64], vf=[levels["critic"]] * 2)} if wide else {}),
        },
    }


class Evaluations(BaseCallback):
    """
    Evaluate the policy after 90 % of the steps.

    :param tests: Environments of the evaluation
    :param timesteps: Number of steps of the training
    """

    def __init__(self, tests: VecEnv, timesteps: int):
        super().__init__()
        self.tests, self.next, self.scores = tests, 0.9 * timesteps, list[Any]()

    def _on_rollout_start(self) -> None:
        if self.num_timesteps >= self.next:
            self.next = np.inf
            self.evaluate()

    def evaluate(self) -> None:
        self.scores.append(evaluate_policy(self.model, self.tests, n_eval_episodes=10)[0])

    def _on_step(self) -> bool:
        return True


def run(job: Job) -> Row:
    task = job.settings["task"]
    package = of_package(task, PACKAGES)
    if package is not None:
        importlib.import_module(package)
    start = time.process_time()
    env = make_vec_env(task, n_envs=job.settings["n_envs"], seed=job.seed)
    arguments = arguments_of(job.settings, env.observation_space, is_discrete(task))
    model = PPOExt(POLICIES.get(task, "MlpPolicy"), env, seed=job.seed, device="cpu", **arguments)
    evaluations = Evaluations(make_vec_env(task, n_envs=10, seed=job.seed + 10_000), job.timesteps)
    model.learn(job.timesteps, callback=evaluations)
    evaluations.evaluate()
    env.close()
    evaluations.tests.close()
    cpu_seconds = time.process_time() - start
    return {**job.settings, "seed": job.seed, "score": float(np.mean(evaluations.scores)), "cpu_seconds": cpu_seconds}


def effects(rows: list[Row], design: str) -> list[list[str]]:
    """:return: A line for each level but the first of each lever of a design, with a cell for each kind of actions"""
    scores = {task: np.array([row["score"] for row in select(rows, task=task)]) for tasks in TASKS.values() for task in tasks}
    rows = [row for row in select(rows, design=design) if len(scores[row["task"]]) > 2]
    levels = [(lever, level) for lever, (_, *others) in DESIGNS[design].items() for level in others]
    columns = []
    for tasks in (sum(TASKS.values(), ()), *TASKS.values()):
        chosen = [row for row in rows if row["task"] in tasks]
        ranks = np.array([rank(row["score"], scores[row["task"]]) for row in chosen])
        has = np.array([[1.0, *(row[lever] == level for lever, level in levels)] for row in chosen])
        if len(chosen) <= 3 * has.shape[-1]:
            columns.append(["-"] * len(levels))
            continue
        coefficients = np.linalg.pinv(has) @ ranks
        variance = ((ranks - has @ coefficients) ** 2).sum() / (len(chosen) - has.shape[1])
        widths = 1.96 * np.sqrt(variance * np.diag(np.linalg.pinv(has.T @ has)))
        columns.append([f"{c:+.2f} ({c - w:+.2f} to {c + w:+.2f})" for c, w in zip(coefficients[1:], widths[1:], strict=True)])
    return [[lever, str(level), *cells] for (lever, level), *cells in zip(levels, *columns, strict=True)]


def main() -> None:
    arguments = parse_arguments(__doc__, timesteps=None, seeds=120, designs=tuple(DESIGNS))
    path = arguments.out / "default_neighbours.csv.gz"
    rows = read_csv(path)
    listed = [job for design in arguments.designs for job in jobs_of(design, arguments.seeds, arguments.timesteps)]
    jobs = [job for job in listed if not select(rows, design=job.settings["design"], seed=job.seed)]
    # Some environments never give back their memory.
    context = multiprocessing.get_context("spawn")
    with context.Pool(arguments.processes, partial(th.set_num_threads, 1), maxtasksperchild=10) as pool:
        for done in pool.imap_unordered(run, jobs):
            rows = sorted([*rows, done], key=lambda row: row["seed"])
            write_csv(path, rows)
            print(done["task"], done["seed"], round(done["score"], 2), round(done["cpu_seconds"]), flush=True)
    for design in arguments.designs:
        print_table(f"effect on the rank, {design}", ["lever", "level", "all", *TASKS], effects(rows, design))


if __name__ == "__main__":
    main()
