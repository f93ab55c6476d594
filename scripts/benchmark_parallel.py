"""
How fast environments step, and PPOExt trains in them, on all cores of a machine: `ParallelVecEnv` and its alternatives.

The contenders have the same environments and hyperparameters, and run in turns in random order, with one thread of PyTorch
each. There are two ratios: that of the fastest turns, which other programs have disturbed least, and the median over the
rounds, with its 95 % confidence interval (bootstrap). All cores take part, so that a turn waits until other programs use less
than a tenth of a core, and is repeated if they have used more meanwhile. After `--patience` seconds it is taken as it is, and
the table says how many of the turns were such "loud" ones. The parts:

- training: steps per second of whole training runs, batches of 256, 10 epochs, networks of 64-64
- make: as training, of what `make` returns: a preset, with normalisation in the model and by `VecNormalize`, and `default`
- environments: steps per second of the environments alone, among them images of 84 x 84 x 4, and environments that compute, or
  wait, for 5 ms
- growth: as environments, with 0, 1, 3, ... workers
- model: the times of which a training run consists, and the speed on more cores that follows from them

Run it: python scripts/benchmark_parallel.py (about 8 minutes; `--parts`, `--rounds`)
It writes docs/performance/parallel.json. With `--markdown` it measures nothing and prints the tables of docs/scaling.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gymnasium as gym
import numpy as np
import torch as th
from benchmark_speed import Frames, ratios
from benchmark_tables import number, table, transposed
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecNormalize

from sb3_ppo_ext import FastDummyVecEnv, ParallelVecEnv, PPOExt, presets
from sb3_ppo_ext import make as make_preset
from sb3_ppo_ext.common.cores import available_cores

PATH = Path(__file__).parents[1] / "docs" / "performance" / "parallel.json"
PARTS = ("training", "make", "environments", "growth", "model")
# Processes start faster, and step as fast.
FORK: dict[str, Any] = {"start_method": "fork"} if "fork" in mp.get_all_start_methods() else {}
# Share of a core that other programs may use during a turn
QUIET = 0.1


class Delayed(gym.Env):
    """Takes 5 ms for a step: computes, or waits as for a server."""

    observation_space = spaces.Box(-1, 1, (8,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, waits: bool):
        self.waits, self.seconds, self.t = waits, 0.005, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        self.t = 0
        return np.zeros(8, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.t += 1
        if self.waits:
            time.sleep(self.seconds)
        else:
            end = time.thread_time() + self.seconds
            while time.thread_time() < end:
                pass
        return np.zeros(8, np.float32), 1.0, False, self.t >= 100, {}


def waiting() -> gym.Env:
    return Delayed(waits=True)


def computing() -> gym.Env:
    return Delayed(waits=False)


TRAINING: dict[str, tuple[Any, int, int]] = {"HalfCheetah-v5, 8 x 256": ("HalfCheetah-v5", 8, 256)}
TRAINING["CartPole-v1, 16 x 128"] = ("CartPole-v1", 16, 128)
# A preset, with normalisation, and its number of environments
PRESET = ("HalfCheetah-v5", 8)
# Environment, number of copies, steps of a turn
ENVIRONMENTS: dict[str, tuple[Any, int, int]] = {
    "HalfCheetah-v5, 8": ("HalfCheetah-v5", 8, 300),
    "CartPole-v1, 2": ("CartPole-v1", 2, 3000),
    "CartPole-v1, 16": ("CartPole-v1", 16, 1000),
    "images, 16": (Frames, 16, 300),
    "computes for 5 ms, 64": (computing, 64, 2),
    "waits for 5 ms, 64": (waiting, 64, 2),
}
WAITING_WORKERS = (0, 1, 7, 31)


class Contender:
    """
    What is measured in turns.

    :param turn: Function that takes a turn
    :param n_steps: Environment steps of a turn
    :param env: Its environments, with their processes
    """

    def __init__(self, turn: Callable[[], Any], n_steps: int, env: VecEnv):
        self.turn, self.n_steps, self.env, self.n_loud = turn, n_steps, env, 0
        processes = getattr(env, "processes", [])
        self.pids = [os.getpid(), *(process.pid for process in processes)]

    def seconds(self, patience: float) -> float:
        """
        :param patience: Seconds to wait for a turn without other programs
        :return: Time of a turn
        """
        deadline = time.monotonic() + patience
        while True:
            while self._load(lambda: time.sleep(0.3))[1] > QUIET and time.monotonic() < deadline:
                pass
            seconds, load = self._load(self.turn)
            if load <= QUIET or time.monotonic() > deadline:
                self.n_loud += load > QUIET
                return seconds

    def _load(self, function: Callable[[], Any]) -> tuple[float, float]:
        """Seconds that a function takes, and the number of cores that other programs have used meanwhile."""
        start, others = time.perf_counter(), self._time_of_others()
        function()
        seconds = time.perf_counter() - start
        return seconds, (self._time_of_others() - others) / seconds

    def _time_of_others(self) -> float:
        """Seconds for which other programs have used a core since the machine was started; 0 where it is not known."""
        try:
            all_of_them = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
            # user, nice, system, interrupts
            busy = sum(int(all_of_them[i]) for i in (0, 1, 2, 5, 6))
            own = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in self.pids]
        except (OSError, IndexError):
            return 0.0
        return (busy - sum(int(ticks) for pair in own for ticks in pair)) / os.sysconf("SC_CLK_TCK")


def trainer(algorithm: Any, setting: tuple[Any, int, int], vec_env_cls: Any, **vec_env_kwargs: Any) -> Contender:
    env_id, n_envs, n_steps = setting
    env = make_vec_env(env_id, n_envs, seed=0, vec_env_cls=vec_env_cls, vec_env_kwargs=vec_env_kwargs)
    return trained(algorithm("MlpPolicy", env, n_steps=n_steps, batch_size=256, n_epochs=10, seed=0, device="cpu"), env)


def trained(model: Any, env: VecEnv, n_rollouts: int = 1) -> Contender:
    steps = n_rollouts * model.n_envs * model.n_steps
    return Contender(lambda: model.learn(steps, reset_num_timesteps=False), steps, env.unwrapped)


def of_preset(vec_env_cls: Any, **options: Any) -> tuple[PPOExt, VecEnv]:
    env_id, n_envs = PRESET
    return make_preset(env_id, n_envs=n_envs, seed=0, vec_env_cls=vec_env_cls, device="cpu", **options)


def in_vec_normalize() -> tuple[PPOExt, VecEnv]:
    env_id, n_envs = PRESET
    entry: dict[str, Any] = presets()[env_id]
    given: dict[str, Any] = {k: v for k, v in entry.items() if k not in ("n_envs", "n_timesteps", "normalize")}
    given.update(n_steps=entry["n_steps"] * entry["n_envs"] // n_envs, gae_lambda=0.95)
    env = VecNormalize(make_vec_env(env_id, n_envs, seed=0, vec_env_cls=FastDummyVecEnv), gamma=entry["gamma"])
    return make_preset(env, seed=0, device="cpu", **given)


def stepper(setting: tuple[Any, int, int], vec_env_cls: Any, **vec_env_kwargs: Any) -> Contender:
    env_id, n_envs, n_steps = setting
    env = make_vec_env(env_id, n_envs, seed=0, vec_env_cls=vec_env_cls, vec_env_kwargs=vec_env_kwargs)
    actions = [np.array([env.action_space.sample() for _ in range(n_envs)]) for _ in range(20)]
    env.reset()

    def turn() -> None:
        for t in range(n_steps):
            env.step(actions[t % 20])

    return Contender(turn, n_steps * n_envs, env)


def training(setting: tuple[Any, int, int]) -> dict[str, Contender]:
    return {
        "PPOExt, FastDummyVecEnv": trainer(PPOExt, setting, FastDummyVecEnv),
        "PPOExt, ParallelVecEnv": trainer(PPOExt, setting, ParallelVecEnv, **FORK),
        "PPOExt, ParallelVecEnv, overlap=False": trainer(PPOExt, setting, ParallelVecEnv, overlap=False, **FORK),
        "PPOExt, SubprocVecEnv": trainer(PPOExt, setting, SubprocVecEnv, **FORK),
        "SB3, DummyVecEnv": trainer(PPO, setting, DummyVecEnv),
        "SB3, SubprocVecEnv": trainer(PPO, setting, SubprocVecEnv, **FORK),
    }


def of_make() -> dict[str, Contender]:
    return {
        "one process": trained(*of_preset(None)),
        "one process, `VecNormalize` instead": trained(*in_vec_normalize()),
        "ParallelVecEnv, statistics per step": trained(*of_preset(ParallelVecEnv)),
        "ParallelVecEnv, statistics per rollout": trained(*of_preset(ParallelVecEnv, normalize_freq="rollout")),
        "the same, two threads": trained(*of_preset(ParallelVecEnv, normalize_freq="rollout", native_threads=2)),
    }


def unknown_task() -> gym.Env:
    return gym.make(PRESET[0])


def as_unknown(vec_env_cls: Any, **options: Any) -> tuple[PPOExt, VecEnv]:
    return make_preset(unknown_task, PRESET[1], 0, vec_env_cls, device="cpu", **options)


def of_default() -> dict[str, Contender]:
    made = {
        "one process": as_unknown(None),
        "one process, statistics per step": as_unknown(None, normalize_freq="step"),
        "ParallelVecEnv": as_unknown(ParallelVecEnv),
        "ParallelVecEnv, statistics per step": as_unknown(ParallelVecEnv, normalize_freq="step"),
        "ParallelVecEnv, two threads": as_unknown(ParallelVecEnv, native_threads=2),
    }
    return {name: trained(*each, n_rollouts=8) for name, each in made.items()}


def environments(setting: tuple[Any, int, int]) -> dict[str, Contender]:
    return {
        "FastDummyVecEnv": stepper(setting, FastDummyVecEnv),
        "ParallelVecEnv": stepper(setting, ParallelVecEnv, **FORK),
        "SubprocVecEnv": stepper(setting, SubprocVecEnv, **FORK),
    }


def growth(name: str, setting: tuple[Any, int, int]) -> dict[str, Contender]:
    n_cores = available_cores()
    numbers = WAITING_WORKERS if name.startswith("waits") else [n - 1 for n in (1, 2, 4, 8, 16, 32) if n <= 2 * n_cores]
    return {f"{n} workers": stepper(setting, ParallelVecEnv, n_workers=n, **FORK) for n in numbers if n < setting[1]}


def contests(part: str) -> Iterator[tuple[str, Callable[[], dict[str, Contender]]]]:
    if part == "training":
        yield from ((name, lambda setting=setting: training(setting)) for name, setting in TRAINING.items())
    elif part == "make":
        yield "{}, {} environments".format(*PRESET), of_make
        yield "{} with `default`, {} environments".format(*PRESET), of_default
    elif part == "environments":
        yield from ((name, lambda setting=setting: environments(setting)) for name, setting in ENVIRONMENTS.items())
    elif part == "growth":
        yield from ((name, lambda name=name, s=setting: growth(name, s)) for name, setting in ENVIRONMENTS.items())


def take_turns(contenders: Mapping[str, Contender], rounds: int, patience: float) -> dict[str, Any]:
    """
    :return: For each contender its thousand steps per second in its fastest turn, the ratio of these and of all turns to those
        of the first contender, the latter with an interval, and the number of turns that were not quiet
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    rng = np.random.default_rng(0)
    for contender in contenders.values():
        contender.turn()
    for _ in range(rounds):
        for name in rng.permutation(list(contenders)).tolist():
            times[name].append(contenders[name].seconds(patience) / contenders[name].n_steps)
    reference = next(iter(contenders))
    found = ratios(times, reference)
    return {
        name: {
            "speed": 1e-3 / min(times[name]),
            "fastest": min(times[reference]) / min(times[name]),
            **{key: found.get(name, {}).get(key, 1.0) for key in ("ratio", "low", "high")},
            "loud": contender.n_loud,
        }
        for name, contender in contenders.items()
    }


# The model


class Timed:
    """
    A method, and the seconds that it has taken.

    :param owner: Object whose method it takes the place of
    :param name: Name of the method
    :param clock: Clock: that of the processor is hardly changed by other programs
    """

    def __init__(self, owner: Any, name: str, clock: Callable[[], float] = time.thread_time):
        self.function, self.clock, self.seconds = getattr(owner, name), clock, 0.0
        vars(owner)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = self.clock()
        try:
            return self.function(*args, **kwargs)
        finally:
            self.seconds += self.clock() - start


class Alone(ParallelVecEnv):
    """Without workers."""

    def __init__(self, env_fns: list[Callable[[], gym.Env]]):
        super().__init__(env_fns, n_workers=0)


class Pair(ParallelVecEnv):
    """With one worker."""

    def __init__(self, env_fns: list[Callable[[], gym.Env]]):
        super().__init__(env_fns, n_workers=1, **FORK)


def of_setting(setting: tuple[Any, int, int], vec_env_cls: Any) -> tuple[PPOExt, Any]:
    env_id, n_envs, n_steps = setting
    env = make_vec_env(env_id, n_envs, seed=0, vec_env_cls=vec_env_cls)
    return PPOExt("MlpPolicy", env, n_steps=n_steps, batch_size=256, n_epochs=10, seed=0, device="cpu"), env


def times_of(model: Any, env: Any, n_rollouts: int = 10) -> dict[str, float]:
    """Microseconds of the parts of a training run, for each step of all environments."""
    n_envs, n_steps, n_workers = model.n_envs, model.n_steps, env.n_workers
    model.learn(n_steps * n_envs)
    clock = time.perf_counter if n_workers else time.thread_time
    timed = {
        "environments": Timed(env._share, "step_envs", clock),
        "share": Timed(env._share, "collect", clock),
        "all": Timed(env, "collect", clock),
        "update": Timed(model, "train", clock),
        "training": Timed(model, "learn", clock),
    }
    vars(model)["learn"](n_rollouts * n_steps * n_envs, reset_num_timesteps=False)
    env.close()
    return {name: 1e6 * each.seconds / (n_rollouts * n_steps) for name, each in timed.items()}


def parts_of(make: Callable[[Any], tuple[PPOExt, Any]], n_envs: int) -> dict[str, float]:
    """Microseconds of the parts of a training run: those of the processor in one process, and what a worker adds."""
    one = times_of(*make(Alone))
    both = [times_of(*make(Pair)) for _ in range(3)]
    return {
        "step of an environment": one["environments"] / n_envs,
        "policy, in each process": one["share"] - one["environments"],
        "messages, and waiting for the other process": float(np.median([each["all"] - each["share"] for each in both])),
        "the rest of a rollout": one["training"] - one["update"] - one["share"],
        "update, for each step": one["update"],
    }


def on_cores(parts: Mapping[str, float], measured: int, n_envs: int, n_cores: int) -> float:
    """
    :param parts: Times with the number of environments for which they were measured
    :param measured: That number
    :param n_envs: Number of environments. All that the main process does by itself grows with it
    :param n_cores: Number of cores
    :return: Thousand steps per second
    """
    messages = parts["messages, and waiting for the other process"] * (n_envs - n_envs // n_cores) / (measured / 2)
    rest = (parts["the rest of a rollout"] + parts["update, for each step"]) * n_envs / measured
    of_process = parts["step of an environment"] * -(-n_envs // n_cores) + parts["policy, in each process"]
    return 1e3 * n_envs / (of_process + messages + rest)


def model() -> dict[str, Any]:
    kinds: dict[str, tuple[Callable[[Any], tuple[PPOExt, Any]], int]] = {
        name: (partial(of_setting, setting), setting[1]) for name, setting in TRAINING.items()
    }
    kinds["{}, {}, `make`".format(*PRESET)] = (partial(of_preset, normalize_freq="rollout"), PRESET[1])
    kinds["{}, {}, `default`".format(*PRESET)] = (as_unknown, PRESET[1])
    found: dict[str, Any] = {}
    for name, (make, n_envs) in kinds.items():
        parts = parts_of(make, n_envs)
        found[name] = {f"{part}, µs": value for part, value in parts.items()}
        for n_cores in (1, 2, 4, 8, 16):
            found[name][f"{n_cores} core{'s'[: n_cores > 1]}, thousand steps/s, computed"] = on_cores(
                parts, n_envs, n_envs, n_cores
            )
        for n_cores in (8, 16):
            found[name][f"{n_cores} cores, 64 environments, thousand steps/s, computed"] = on_cores(parts, n_envs, 64, n_cores)
    return found


# Tables


def speed(result: Mapping[str, float]) -> str:
    return number(result["speed"])


def fastest(result: Mapping[str, float]) -> str:
    return f"{result['fastest']:.2f}"


def ratio(result: Mapping[str, float]) -> str:
    return f"{result['ratio']:.2f} ({result['low']:.2f} to {result['high']:.2f})"


# Cells of the tables by what they show
CELLS = {
    "thousand steps/s in the fastest turn": speed,
    "ratio of the fastest turns": fastest,
    "ratio of all turns": ratio,
}


def tables(results: Mapping[str, Any]) -> Iterator[str]:
    """
    :param results: Results by part; parts may be missing
    :return: The tables of each part, of which the last one has ratios to the first row
    """
    for part in ("training", "make", "environments", "growth"):
        if part == "make" and part in results:
            for name, of_task in results[part].items():
                columns = {title: {row: cell(each) for row, each in of_task.items()} for title, cell in CELLS.items()}
                yield table(name, columns, str)
        elif part in results:
            yield table("thousand steps/s in the fastest turn", results[part], speed)
            yield table("ratio of all turns to the first row", results[part], ratio)
    if "model" in results:
        yield table("", transposed(transposed(results["model"])), number)


def measure(part: str, rounds: int, patience: float) -> dict[str, Any]:
    if part == "model":
        return model()
    found = {}
    for name, make in contests(part):
        contenders = make()
        found[name] = take_turns(contenders, rounds, patience)
        print(part, name, {each: (speed(one), ratio(one)) for each, one in found[name].items()}, flush=True)
        for contender in contenders.values():
            contender.env.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contender (default: %(default)s)")
    parser.add_argument("--patience", type=float, default=20, help="seconds to wait for a quiet turn (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=PATH, help="file of the results (default: %(default)s)")
    parser.add_argument("--markdown", action="store_true", help="print the tables of what was measured before")
    arguments = parser.parse_args()
    results = json.loads(arguments.out.read_text())["results"] if arguments.out.exists() else {}
    if not arguments.markdown:
        th.set_num_threads(1)
        warnings.simplefilter("ignore")
        for part in arguments.parts:
            results[part] = measure(part, arguments.rounds, arguments.patience)
            results = {each: results[each] for each in PARTS if each in results}
            machine = {"cores": available_cores(), "system": os.uname().sysname if hasattr(os, "uname") else os.name}
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")
    print(*tables(results), sep="\n\n")


if __name__ == "__main__":
    main()
