"""
How fast several processes of torchrun train one model, compared with one process.

In each round, rank 0 first trains alone, while the others sleep. Then each rank trains a model of its own at the same time,
which is what the machine can do, and all ranks train one model: with as many samples per rank in each minibatch as alone, and
with the same batch size. A ratio is the environment steps per second of all ranks over those of rank 0 alone, the median over
the rounds with its 95 % confidence interval (bootstrap). The transport is timed, too: the sum of a gradient over all ranks, by
shared memory and by gloo.

Run it: torchrun --nproc-per-node 2 scripts/benchmark_ranks.py (about five minutes; `--rounds`)
It prints the tables of docs/scaling.md.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch as th
import torch.distributed as dist
from benchmark_speed import ratios
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ppo_ext import FastDummyVecEnv, PPOExt
from sb3_ppo_ext.distributed.launch import Distributed, find_launch
from sb3_ppo_ext.distributed.ranks import ProcessGroup, connect

CASES: dict[str, dict[str, Any]] = {
    "HalfCheetah-v5, 8 x 256, batch 256, 10 epochs": dict(env="HalfCheetah-v5", n_envs=8, n_steps=256, batch_size=256),
    "the same with VecNormalize": dict(env="HalfCheetah-v5", n_envs=8, n_steps=256, batch_size=256, normalize=True),
    "CartPole-v1, 16 x 128, batch 256, 10 epochs": dict(env="CartPole-v1", n_envs=16, n_steps=128, batch_size=256),
}
# Number of rollouts in a turn
N_ROLLOUTS = 12
# Number of parameters of two networks of 64-64 and of 256-256 for HalfCheetah
GRADIENTS = {"64-64": 11_000, "256-256": 143_000}


def make_model(case: dict[str, Any], batch_size: int, distributed: Distributed) -> PPOExt:
    env: Any = make_vec_env(case["env"], case["n_envs"], vec_env_cls=FastDummyVecEnv)
    if case.get("normalize"):
        env = VecNormalize(env)
    return PPOExt("MlpPolicy", env, n_steps=case["n_steps"], batch_size=batch_size, distributed=distributed, device="cpu")


def speed_of(model: PPOExt, steps: int) -> float:
    start = time.perf_counter()
    before = model.num_timesteps
    model.learn(steps, reset_num_timesteps=False)
    return (model.num_timesteps - before) / (time.perf_counter() - start)


def measure(case: dict[str, Any], n_rounds: int, ranks: Any) -> list[list[float]]:
    """
    Steps per second in each round: alone, each rank by itself at the same time, which is what the machine can do, together
    with larger batches, and together with the same batch size.
    """
    n_own = case["n_envs"] * case["n_steps"]
    alone = make_model(case, case["batch_size"], "off")
    weak = make_model(case, case["batch_size"] * ranks.size, "auto")
    same = make_model(case, case["batch_size"], "auto")
    rows = []
    for number in range(n_rounds + 1):
        row = [speed_of(alone, N_ROLLOUTS * n_own) if ranks.is_first else 0.0]
        ranks.gather(None)  # The others have waited here.
        row.append(sum(ranks.gather(speed_of(alone, N_ROLLOUTS * n_own))))
        row += [speed_of(model, N_ROLLOUTS * n_own * ranks.size) for model in (weak, same)]
        if number > 0:  # The first round warms up.
            rows.append(row)
    return rows


def microseconds(exchange: Callable[[th.Tensor], Any], n: int, repeats: int) -> float:
    tensor = th.ones(n)
    for _ in range(repeats // 10):
        exchange(tensor)
    start = time.perf_counter()
    for _ in range(repeats):
        exchange(tensor)
    return (time.perf_counter() - start) / repeats * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    th.set_num_threads(1)
    ranks = connect(find_launch("auto"))
    assert isinstance(ranks, ProcessGroup), "run it with torchrun"
    columns = ("independent training runs", f"batch size times {ranks.size}", "same batch size")
    lines = [f"| {ranks.size} ranks over one | {' | '.join(columns)} |", "| --- | --- | --- | --- |"]
    for name, case in CASES.items():
        speeds = np.array(measure(case, arguments.rounds, ranks))
        if ranks.is_first:
            times = {name: (1 / column).tolist() for name, column in zip(("alone", *columns), speeds.T, strict=True)}
            cells = ratios(times, "alone").values()
            texts = [f"{cell['ratio']:.2f} ({cell['low']:.2f} to {cell['high']:.2f})" for cell in cells]
            lines.append(f"| {name} | {' | '.join(texts)} |")
    lines += ["", "| µs for the sum of a gradient | shared memory | gloo |", "| --- | --- | --- |"]
    for name, n in GRADIENTS.items():
        shared = microseconds(ranks.sum, n, 2000)
        gloo = microseconds(lambda tensor: dist.all_reduce(tensor, group=ranks.group), n, 200)
        lines.append(f"| {name} | {shared:.0f} | {gloo:.0f} |")
    if ranks.is_first:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
