"""
How fast PPOExt trains in environments that step in tensors, on a CPU: compared with SB3's PPO and with rsl_rl's.

The contenders have the same environments, networks (64-64 tanh for the actor, and for the critic), minibatches, epochs and
steps. They run in turns, as in `benchmark_speed.py`, with one thread of PyTorch; JAX has as many as there are cores, for all.
A ratio is the median over the rounds, with its 95 % confidence interval (bootstrap). The parts:

- gymnax: 1024 CartPole-v1 of gymnax in one `JaxVecEnv`, 32 steps per rollout, with the minibatches of PureJaxRL (4 epochs of
  4) and with SB3's number of epochs (10, of 16 minibatches)
- rsl_rl: 1024 Pendulum-v1 in PyTorch, 24 steps per rollout, 5 epochs of 4 minibatches, which are the defaults of rsl_rl and
  Isaac Lab, with clipped values and a fixed learning rate (needs `pip install rsl-rl-lib`)
- growth: as gymnax with 4 epochs of 4 minibatches, for 64 to 8192 environments
- purejaxrl: CartPole-v1 of gymnax with `ppo.py` of PureJaxRL, which is one compiled function for the whole training, 4 epochs
  of 4 minibatches, with clipped values and a fixed learning rate (needs a clone of https://github.com/luchris429/purejaxrl,
  its requirements, and `PYTHONPATH=purejaxrl/purejaxrl`). `stepped` is PPOExt with a callback that sees each step. Run it on
  one core: `taskset -c 0`
- brax: brax's ant with brax's own PPO, 256 environments, 16 steps per rollout, 4 epochs of 4 minibatches, normalised
  observations and a fixed learning rate (needs `pip install brax`). Run it on one core as well

Run it: python scripts/benchmark_tensor_envs.py (about 10 minutes; `--parts`, `--rounds`)
It writes docs/performance/tensor_environments.csv; the parts that are not run keep their rows. With `--markdown` it measures
nothing and prints the tables of docs/tensor_environments.md.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch as th
from benchmark_speed import ratios, take_turns
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback

from sb3_ppo_ext import JaxVecEnv, PPOExt, TorchVecEnv

ROOT = Path(__file__).parents[1]
PATH = ROOT / "docs" / "performance" / "tensor_environments.csv"
PARTS = ("gymnax", "rsl_rl", "growth", "purejaxrl", "brax")
SIZES = (64, 256, 1024, 4096, 8192)
NAMES = {"native": '`PPOExt`, `backend="native"`', "device": '`PPOExt`, `backend="device"`', "SB3": "SB3", "rsl_rl": "rsl_rl"}
NAMES |= {"PureJaxRL": "PureJaxRL", "brax": "brax's PPO", "stepped": '`PPOExt`, `backend="native"`, stepped'}
Row = dict[str, Any]


@dataclass
class Turn:
    """
    A turn of one contender, and the seconds that its turns have taken.

    :param train: Function that trains
    :param steps: Timesteps of a turn
    """

    train: Callable[[], Any]
    steps: int

    def __post_init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self) -> None:
        start = time.perf_counter()
        self.train()
        self.seconds.append(time.perf_counter() - start)

    def speed(self) -> float:
        """:return: Timesteps per second, without the first turn, which compiles"""
        return self.steps / float(np.median(self.seconds[1:]))


def gymnax_contest(n_envs: int, n_minibatches: int, n_epochs: int, names: tuple[str, ...]) -> dict[str, Turn]:
    n_steps = 32
    n_samples = n_steps * n_envs
    steps = max(n_samples, 32768)

    def make(name: str) -> Turn:
        env = JaxVecEnv("CartPole-v1", num_envs=n_envs)
        algorithm, backend = (PPO, {}) if name == "SB3" else (PPOExt, {"backend": name})
        options: Any = dict(n_steps=n_steps, batch_size=n_samples // n_minibatches, n_epochs=n_epochs, gamma=0.98, **backend)
        model = algorithm("MlpPolicy", env, learning_rate=1e-3, gae_lambda=0.8, seed=0, device="cpu", **options)
        return Turn(lambda: model.learn(steps, reset_num_timesteps=False), steps)

    return {name: make(name) for name in names}


# rsl_rl


def torch_pendulum(n_envs: int) -> Any:
    """Pendulum-v1 in PyTorch, which the tests compare with Gymnasium's."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support.torch_envs import TorchPendulum

    return TorchPendulum(n_envs)


class ForRslRl:
    """Pendulum in PyTorch with the interface of rsl_rl's environments."""

    num_actions = 1

    def __init__(self, env: Any):
        self.cfg: dict[str, Any] = {}
        self.env, self.num_envs, self.device = env, env.num_envs, env.device
        self.max_episode_length, self.episode_length_buf = env.max_episode_steps, env.time
        self.observations, _ = env.reset(seed=0)

    def get_observations(self) -> Any:
        from tensordict import TensorDict

        return TensorDict({"policy": self.observations}, batch_size=[self.num_envs])

    def step(self, actions: th.Tensor) -> tuple[Any, th.Tensor, th.Tensor, dict[str, Any]]:
        self.observations, rewards, terminated, truncated, _ = self.env.step(actions)
        return self.get_observations(), rewards, terminated | truncated, {"time_outs": truncated}


def rsl_rl_turn(n_envs: int, n_steps: int, n_rollouts: int) -> Turn:
    from rsl_rl.runners import OnPolicyRunner  # type: ignore[import-not-found, import-untyped, unused-ignore]

    network: Any = dict(class_name="rsl_rl.models:MLPModel", hidden_dims=[64, 64], activation="tanh", obs_normalization=False)
    gaussian = dict(class_name="rsl_rl.modules.distribution:GaussianDistribution", init_std=1.0, std_type="log")
    ppo = dict(class_name="rsl_rl.algorithms:PPO", num_learning_epochs=5, num_mini_batches=4, entropy_coef=0.0, gamma=0.9)
    ppo |= dict(learning_rate=1e-3, schedule="fixed", normalize_advantage_per_mini_batch=True)
    groups = dict(actor=["policy"], critic=["policy"])
    config = dict(algorithm=ppo, actor={**network, "distribution_cfg": gaussian}, critic=network, obs_groups=groups)
    config |= dict(num_steps_per_env=n_steps, save_interval=10**9, multi_gpu=None)
    with contextlib.redirect_stdout(io.StringIO()):
        runner = OnPolicyRunner(ForRslRl(torch_pendulum(n_envs)), config, log_dir=None, device="cpu")

    # rsl_rl turns the checks of PyTorch's distributions off for the whole process, and the other contenders have them.
    validation = th.distributions.Distribution.set_default_validate_args

    def train() -> None:
        validation(False)
        with contextlib.redirect_stdout(io.StringIO()):
            runner.learn(n_rollouts)
        validation(__debug__)

    validation(__debug__)

    return Turn(train, n_envs * n_steps * n_rollouts)


def rsl_rl_contest(n_envs: int = 1024, n_steps: int = 24, n_rollouts: int = 2) -> dict[str, Turn]:
    steps = n_envs * n_steps * n_rollouts

    def make(backend: str) -> Turn:
        options: Any = dict(n_steps=n_steps, batch_size=n_envs * n_steps // 4, n_epochs=5, gamma=0.9, learning_rate=1e-3)
        options |= dict(vf_coef=1.0, max_grad_norm=1.0, clip_range_vf=0.2, vf_clip_mode="max", backend=backend)
        model = PPOExt("MlpPolicy", TorchVecEnv(torch_pendulum(n_envs)), seed=0, device="cpu", **options)
        return Turn(lambda: model.learn(steps, reset_num_timesteps=False), steps)

    return {"rsl_rl": rsl_rl_turn(n_envs, n_steps, n_rollouts), "native": make("native"), "device": make("device")}


# PureJaxRL


class SeesEachStep(BaseCallback):
    """A callback of a user, for which environments are stepped."""

    def _on_step(self) -> bool:
        return True


def purejaxrl_turn(n_envs: int, n_steps: int, steps: int) -> Turn:
    import jax
    import ppo  # type: ignore[import-not-found, import-untyped, unused-ignore]

    config: dict[str, Any] = dict(ENV_NAME="CartPole-v1", NUM_ENVS=n_envs, NUM_STEPS=n_steps, TOTAL_TIMESTEPS=steps, LR=2.5e-4)
    config |= dict(UPDATE_EPOCHS=4, NUM_MINIBATCHES=4, GAMMA=0.99, GAE_LAMBDA=0.95, CLIP_EPS=0.2, ENT_COEF=0.01, VF_COEF=0.5)
    config |= dict(MAX_GRAD_NORM=0.5, ACTIVATION="tanh", ANNEAL_LR=False, DEBUG=False)
    train = jax.jit(ppo.make_train(config)).lower(jax.random.key(0)).compile()
    return Turn(lambda: jax.block_until_ready(train(jax.random.key(1))), steps)


def purejaxrl_contest(n_envs: int, n_steps: int) -> dict[str, Turn]:
    steps = max(n_envs * n_steps, 131072)

    def make(callback: BaseCallback | None) -> Turn:
        options: Any = dict(n_steps=n_steps, batch_size=n_envs * n_steps // 4, n_epochs=4, learning_rate=2.5e-4, ent_coef=0.01)
        env = JaxVecEnv("CartPole-v1", num_envs=n_envs)
        model = PPOExt("MlpPolicy", env, clip_range_vf=0.2, seed=0, device="cpu", backend="native", **options)
        return Turn(lambda: model.learn(steps, callback, reset_num_timesteps=False), steps)

    pure = purejaxrl_turn(n_envs, n_steps, steps)
    return {"PureJaxRL": pure, "native": make(None), "stepped": make(SeesEachStep())}


# brax


class BraxTraining:
    """
    A training by brax's PPO in a thread, which waits after each epoch for the next call.

    :param steps: Timesteps of an epoch
    :param n_epochs: Number of epochs after which it ends
    :param options: Further arguments of brax's `train`
    """

    def __init__(self, steps: int, n_epochs: int, **options: Any):
        import jax
        from brax.training.agents.ppo.train import train  # type: ignore[import-not-found, import-untyped, unused-ignore]

        if not hasattr(jax, "device_put_replicated"):  # which brax 0.14.2 calls, and JAX 0.10 no longer has
            jax.device_put_replicated = lambda x, devices: jax.tree.map(lambda p: jax.numpy.stack([p] * len(devices)), x)
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        options |= dict(num_timesteps=steps * n_epochs, num_evals=n_epochs + 1, run_evals=False, progress_fn=self._end_epoch)
        self.thread = threading.Thread(target=lambda: self.go.acquire() and train(**options), daemon=True)
        self.thread.start()
        self()  # up to the report before the first epoch

    def _end_epoch(self, *_: Any) -> None:
        self.done.release()
        self.go.acquire()

    def __call__(self) -> None:
        self.go.release()
        while not self.done.acquire(timeout=1):
            assert self.thread.is_alive(), "brax's training has ended"


def brax_contest(rounds: int, n_envs: int = 256, n_steps: int = 16, n_rollouts: int = 2) -> dict[str, Turn]:
    import brax.envs  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from brax.training.agents.ppo.networks import make_ppo_networks  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from flax import linen

    steps, rate = n_envs * n_steps * n_rollouts, 3e-4
    networks: Any = dict(policy_hidden_layer_sizes=(64, 64), value_hidden_layer_sizes=(64, 64), activation=linen.tanh)
    networks |= dict(distribution_type="normal", noise_std_type="log")
    theirs: Any = dict(environment=brax.envs.create("ant", auto_reset=False, episode_length=None), episode_length=1000)
    theirs |= dict(num_envs=n_envs, unroll_length=n_steps, batch_size=n_envs // 4, num_minibatches=4, num_updates_per_batch=4)
    theirs |= dict(learning_rate=rate, entropy_cost=0.0, discounting=0.99, clipping_epsilon=0.2, max_grad_norm=0.5)
    theirs |= dict(normalize_observations=True, network_factory=partial(make_ppo_networks, **networks))
    env = JaxVecEnv(brax.envs.create("ant", episode_length=1000, auto_reset=False), num_envs=n_envs)
    options: Any = dict(n_steps=n_steps, batch_size=n_envs * n_steps // 4, n_epochs=4, learning_rate=rate, normalize_obs=True)
    model = PPOExt("MlpPolicy", env, normalize_freq="rollout", seed=0, device="cpu", backend="native", **options)
    return {
        "brax": Turn(BraxTraining(steps, rounds + 2, **theirs), steps),
        "native": Turn(lambda: model.learn(steps, reset_num_timesteps=False), steps),
    }


# Measuring


def contests(part: str, rounds: int) -> Iterator[tuple[str, Mapping[str, Turn]]]:
    """The comparisons of a part: their names, and the contenders. The first one is the reference."""
    if part == "gymnax":
        for n_epochs, n_minibatches in ((4, 4), (10, 16)):
            name = f"{n_epochs} epochs of {n_minibatches} minibatches"
            yield name, gymnax_contest(1024, n_minibatches, n_epochs, ("SB3", "native", "device"))
    elif part == "rsl_rl":
        yield "5 epochs of 4 minibatches", rsl_rl_contest()
    elif part == "growth":
        for n_envs in SIZES:
            yield f"{n_envs} environments", gymnax_contest(n_envs, 4, 4, ("SB3", "native", "device"))
    elif part == "purejaxrl":
        for n_envs, n_steps in ((64, 128), (1024, 32)):
            yield f"{n_envs} environments, {n_steps} steps", purejaxrl_contest(n_envs, n_steps)
    elif part == "brax":
        yield "256 environments, 16 steps", brax_contest(rounds)


def measure(part: str, rounds: int) -> Iterator[Row]:
    for name, contenders in contests(part, rounds):
        reference = next(iter(contenders))
        found = ratios(take_turns(contenders, rounds, time.perf_counter), reference)
        for contender, turn in contenders.items():
            row: Row = {"part": part, "setting": name, "contender": contender, "steps_per_second": round(turn.speed())}
            if contender in found:
                row |= {key: round(found[contender][key], 3) for key in ("ratio", "low", "high")}
            print(row, flush=True)
            yield row


def read() -> list[Row]:
    if not PATH.exists():
        return []
    with PATH.open(newline="") as file:
        return list(csv.DictReader(file))


def write(rows: list[Row]) -> None:
    PATH.parent.mkdir(parents=True, exist_ok=True)
    with PATH.open("w", newline="") as file:
        columns = ("part", "setting", "contender", "steps_per_second", "ratio", "low", "high")
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def tables(rows: list[Row]) -> Iterator[str]:
    """The tables of the documentation for each part, of speeds and of ratios: columns are settings, rows contenders."""
    for part in PARTS:
        of_part = [row for row in rows if row["part"] == part]
        if not of_part:
            continue
        settings = list(dict.fromkeys(row["setting"] for row in of_part))
        contenders = list(dict.fromkeys(row["contender"] for row in of_part))
        for corner, cell in {"thousand steps/s": speed, f"ratio to {NAMES[contenders[0]]}": ratio}.items():
            cells = {(row["contender"], row["setting"]): cell(row) for row in of_part}
            lines = [[corner, *settings], ["---"] * (1 + len(settings))]
            shown = [name for name in contenders if any(cells.get((name, setting)) for setting in settings)]
            lines += [[NAMES[name], *(cells.get((name, setting), "") for setting in settings)] for name in shown]
            yield "\n".join("| " + " | ".join(line) + " |" for line in lines)


def speed(row: Row) -> str:
    return f"{float(row['steps_per_second']) / 1000:.0f}"


def ratio(row: Row) -> str:
    if not row.get("ratio"):
        return ""
    middle, low, high = (f"{float(row[key]):.1f}" for key in ("ratio", "low", "high"))
    return f"{middle} ({low} to {high})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contender (default: %(default)s)")
    parser.add_argument("--markdown", action="store_true", help="print the tables of what was measured before")
    arguments = parser.parse_args()
    rows = read()
    if not arguments.markdown:
        th.set_num_threads(1)
        warnings.simplefilter("ignore")
        for part in arguments.parts:
            measured = list(measure(part, arguments.rounds))
            rows = [row for row in rows if row["part"] != part] + measured
            rows.sort(key=lambda row: PARTS.index(row["part"]))
            write(rows)
    print(*tables(rows), sep="\n\n")


if __name__ == "__main__":
    main()
