"""
How fast PPOExt trains compared with SB3's PPO: the same hyperparameters and environments, one thread, in turns.

Machines change their speed from second to second, so only ratios of runs that are close in time are meaningful. The contenders
therefore run in turns in random order, each for about a second, between two runs of a fixed workload that measures the speed
of the machine at that time. Times are those of the processor, which other processes take no part of. The script prints the
median of the ratios over all rounds with its 95 % confidence interval (bootstrap). SBX takes part if it is installed (`pip
install sbx-rl`).

Run it: python scripts/benchmark_speed.py (about 20 minutes; `--parts`, `--rounds`)
It writes docs/performance/benchmark.json and benchmark.svg. With `--markdown` it measures nothing and prints the tables of
docs/performance.md from benchmark.json.

With `--against REVISION`, it compares the working tree, whose modules must be built, with that revision in the four
configurations, prints which of them has become slower beyond the interval, and then fails (a few minutes).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import benchmark_against as against
import benchmark_profile as profile
import gymnasium as gym
import numpy as np
import torch as th
from benchmark_tables import tables
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecMonitor, VecNormalize
from torch import nn

from sb3_ppo_ext import FastDummyVecEnv, PPOExt, VectorEnvAdapter, presets
from sb3_ppo_ext import make as make_preset
from sb3_ppo_ext.plot_run import COLORS, STYLE

OUT = Path(__file__).parents[1] / "docs" / "performance"
# The compiler comes last, because it slows the process down once it is loaded.
PARTS = ("main", "policies", "growth", "startup", "profile", "compile")
# Needs two cores, is measured if it is named, and is only printed
THREADS_PART = "threads"
IN_RATIOS = ("main", "policies", "growth", "compile")
TITLES = {
    "main": "the four configurations",
    "policies": "other policies and options",
    "growth": "number of environments",
    "compile": 'with backend="compile"',
}


class Frames(gym.Env):
    """Random images of 84 x 84, four of them stacked, with as little computation as possible."""

    observation_space = spaces.Box(0, 255, (84, 84, 4), np.uint8)
    action_space = spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.frames = self.np_random.integers(256, size=(16, 84, 84, 4), dtype=np.uint8)
        self.t = 0
        return self.frames[0], {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.t += 1
        return self.frames[self.t % 16], float(action), False, self.t >= 100, {}


class AsDict(gym.ObservationWrapper):
    """Splits the observation into a Dict of two parts."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        box = env.observation_space
        assert isinstance(box, spaces.Box)
        parts = {"first": slice(1), "rest": slice(1, None)}
        self.parts = parts
        self.observation_space = spaces.Dict({k: spaces.Box(box.low[s], box.high[s]) for k, s in parts.items()})

    def observation(self, observation: np.ndarray) -> dict[str, np.ndarray]:
        return {key: observation[part] for key, part in self.parts.items()}


@dataclass(frozen=True)
class Setting:
    """What is trained: an environment, the number of its copies, the hyperparameters, and the timesteps of a turn."""

    env: Any
    n_envs: int
    steps: int
    policy: str = "MlpPolicy"
    wrapper: Any = None
    options: dict[str, Any] = field(default_factory=dict)

    def make_env(self, vec_env_cls: type[DummyVecEnv] = DummyVecEnv) -> VecEnv:
        return make_vec_env(self.env, self.n_envs, seed=0, vec_env_cls=vec_env_cls, wrapper_class=self.wrapper)


A = dict(n_steps=32, batch_size=256, n_epochs=20, gamma=0.98, gae_lambda=0.8, learning_rate=1e-3)
B = dict(n_steps=1024, batch_size=64, n_epochs=10, gamma=0.9, learning_rate=1e-3)
C = dict(n_steps=2048, batch_size=64, n_epochs=10)
D = dict(n_steps=128, batch_size=2048, n_epochs=4)
WIDE = dict(policy_kwargs=dict(net_arch=[256, 256]))
MAIN = {
    "a": Setting("CartPole-v1", 8, 4096, options=A),
    "b": Setting("Pendulum-v1", 4, 4096, options=B),
    "c": Setting("HalfCheetah-v5", 1, 2048, options=C),
    "d": Setting("CartPole-v1", 64, 16384, options=D),
}
POLICIES: dict[str, tuple[Setting, dict[str, Any]]] = {
    "Beta": (Setting("Pendulum-v1", 4, 4096, options=B), dict(action_dist="beta")),
    "squashed Gaussian": (Setting("Pendulum-v1", 4, 4096, options=B), dict(action_dist="squashed_gaussian")),
    "gSDE": (Setting("Pendulum-v1", 4, 4096, options={**B, "use_sde": True}), {}),
    "256-256, a": (Setting("CartPole-v1", 8, 2048, options={**A, **WIDE}), {}),
    "256-256, b": (Setting("Pendulum-v1", 4, 4096, options={**B, **WIDE}), {}),
    "256-256, c": (Setting("HalfCheetah-v5", 1, 2048, options={**C, **WIDE}), {}),
    "Dict": (Setting("Pendulum-v1", 4, 4096, "MultiInputPolicy", AsDict, B), {}),
    "CNN": (Setting(Frames, 8, 512, "CnnPolicy", options=dict(n_steps=64, batch_size=256, n_epochs=4)), {}),
    "all losses": (
        Setting("Pendulum-v1", 4, 4096, options=B),
        dict(bounds_coef=0.01, kl_coef=0.1, dual_clip=3.0, clip_range_vf=0.2),
    ),
}
# As the entry `default`, but for normalised advantages, which cost nothing
DEFAULT = Setting(
    "HalfCheetah-v5",
    8,
    4096,
    options={
        **{name: presets()["default"][name] for name in ("n_steps", "batch_size", "n_epochs")},
        "policy_kwargs": dict(activation_fn=nn.ReLU),
    },
)
COMPILED = {
    "b": MAIN["b"],
    "Mish, b": Setting("Pendulum-v1", 4, 4096, options={**B, "policy_kwargs": dict(activation_fn=nn.Mish)}),
    "256-256, b": POLICIES["256-256, b"][0],
    "CNN": POLICIES["CNN"][0],
}


# Updates alone, as many in a turn as stated, and whole training runs for 0
THREADS: list[tuple[str, Setting, int]] = [
    (f"{net}-{net}, batches of {size}, updates", Setting("HalfCheetah-v5", 1, 2048, options=options), 4)
    for net in (64, 256)
    for size in (64, 256, 2048)
    for options in [dict(n_steps=2048, batch_size=size, policy_kwargs=dict(net_arch=[net, net]))]
]
THREADS += [(f"{name}, training", POLICIES[name][0], 0) for name in ("256-256, a", "256-256, b", "256-256, c")]


def growing(n_envs: int) -> Setting:
    return Setting("CartPole-v1", n_envs, 4096, options=dict(n_steps=2048 // n_envs, batch_size=256, n_epochs=4))


# Contenders are functions that train for one turn


def make(algorithm: type, setting: Setting, env: VecEnv, **options: Any) -> Any:
    return algorithm(setting.policy, env, seed=0, device="cpu", **{**setting.options, **options})


def trainer(algorithm: type, setting: Setting, env: VecEnv, **options: Any) -> Callable[[], None]:
    model = make(algorithm, setting, env, **options)
    return lambda: model.learn(setting.steps, reset_num_timesteps=False)


def trainer_of_default() -> Callable[[], None]:
    """A function, which has no preset of its own, for the task."""
    model: Any = make_preset(lambda: gym.make(DEFAULT.env), seed=0, device="cpu")[0]
    return lambda: model.learn(DEFAULT.steps, reset_num_timesteps=False)


def trainer_in_threads(setting: Setting, updates: int, **options: Any) -> Callable[[], None]:
    """A turn is a number of updates from one rollout, with 0 a training run."""
    model = make(PPOExt, setting, setting.make_env(), backend="native", **options)
    model.learn(setting.steps)
    if not updates:
        return lambda: model.learn(setting.steps, reset_num_timesteps=False)

    def update() -> None:
        for _ in range(updates):
            model.train()

    return update


def all_in_one_call(setting: Setting) -> VecEnv:
    venv = gym.make_vec(setting.env, num_envs=setting.n_envs, vectorization_mode="vector_entry_point")
    return VecMonitor(VectorEnvAdapter(venv))


def sbx_trainer(setting: Setting) -> Callable[[], None] | None:
    try:
        from sbx import PPO as SBX  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        print("SBX is not installed and is left out (pip install sbx-rl)")
        return None
    model = SBX(setting.policy, setting.make_env(), seed=0, **setting.options)
    return lambda: model.learn(setting.steps, reset_num_timesteps=False)


def main_contenders(name: str, setting: Setting) -> dict[str, Callable[[], None] | None]:
    contenders = {
        "SB3": trainer(PPO, setting, setting.make_env()),
        "SBX": sbx_trainer(setting),
        "CleanRL style": CleanRLStyle(setting).turn,
        "eager": trainer(PPOExt, setting, setting.make_env(), backend="eager"),
        "PPOExt": trainer(PPOExt, setting, setting.make_env()),
        "PPOExt, FastDummyVecEnv": trainer(PPOExt, setting, setting.make_env(FastDummyVecEnv)),
    }
    if name == "d":
        contenders["PPOExt, VectorEnvAdapter"] = trainer(PPOExt, setting, all_in_one_call(setting))
    return contenders


class CleanRLStyle:
    """PPO in a single class with torch's distributions, as single-file implementations write it."""

    def __init__(self, setting: Setting):
        self.o = dict(gamma=0.99, gae_lambda=0.95, learning_rate=3e-4) | setting.options
        self.setting, self.envs = setting, setting.make_env()
        space = self.envs.action_space
        self.discrete = isinstance(space, spaces.Discrete)
        sizes: Any = (self.envs.observation_space.shape, space.n if isinstance(space, spaces.Discrete) else space.shape)
        n_in, n_out = sizes[0][0], sizes[1] if self.discrete else sizes[1][0]

        def net(n: int) -> nn.Module:
            return nn.Sequential(nn.Linear(n_in, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, n))

        self.actor, self.critic, self.log_std = net(n_out), net(1), nn.Parameter(th.zeros(n_out))
        parameters = [*self.actor.parameters(), *self.critic.parameters(), *([] if self.discrete else [self.log_std])]
        self.parameters = parameters
        self.optimizer = th.optim.Adam(parameters, lr=self.o["learning_rate"], eps=1e-5)
        self.obs, self.done = th.as_tensor(self.envs.reset(), dtype=th.float32), th.zeros(setting.n_envs)

    def distribution(self, obs: th.Tensor) -> Any:
        if self.discrete:
            return th.distributions.Categorical(logits=self.actor(obs))
        return th.distributions.Independent(th.distributions.Normal(self.actor(obs), self.log_std.exp()), 1)

    def turn(self) -> None:
        per_rollout = self.o["n_steps"] * self.setting.n_envs
        for _ in range(-(-self.setting.steps // per_rollout)):
            self.update(*self.collect())

    def collect(self) -> tuple[th.Tensor, ...]:
        n = self.o["n_steps"]
        rows: list[tuple[th.Tensor, ...]] = []
        for _ in range(n):
            with th.no_grad():
                distribution = self.distribution(self.obs)
                action = distribution.sample()
                values, log_probs = self.critic(self.obs).flatten(), distribution.log_prob(action)
            space = self.envs.action_space
            clipped = action.numpy() if self.discrete else np.clip(action.numpy(), space.low, space.high)  # type: ignore[attr-defined]
            new_obs, rewards, dones, _ = self.envs.step(clipped)
            rows.append((self.obs, action, log_probs, values, th.as_tensor(rewards), self.done))
            self.obs, self.done = th.as_tensor(new_obs, dtype=th.float32), th.as_tensor(dones).float()
        obs, actions, log_probs, values, earned, starts = (th.stack(column) for column in zip(*rows, strict=True))
        with th.no_grad():
            next_values, next_done = self.critic(self.obs).flatten(), self.done
        advantages, last = th.zeros_like(earned), th.zeros(self.setting.n_envs)
        for t in reversed(range(n)):
            delta = earned[t] + self.o["gamma"] * next_values * (1 - next_done) - values[t]
            last = advantages[t] = delta + self.o["gamma"] * self.o["gae_lambda"] * (1 - next_done) * last
            next_values, next_done = values[t], starts[t]
        return tuple(x.flatten(0, 1) for x in (obs, actions, log_probs, advantages, advantages + values))

    def update(self, obs: th.Tensor, actions: th.Tensor, log_probs: th.Tensor, advs: th.Tensor, returns: th.Tensor) -> None:
        for _ in range(self.o["n_epochs"]):
            for index in th.randperm(len(obs)).split(self.o["batch_size"]):
                distribution = self.distribution(obs[index])
                ratio = (distribution.log_prob(actions[index]) - log_probs[index]).exp()
                adv = (advs[index] - advs[index].mean()) / (advs[index].std() + 1e-8)
                policy_loss = th.max(-adv * ratio, -adv * ratio.clamp(0.8, 1.2)).mean()
                value_loss = 0.5 * (self.critic(obs[index]).flatten() - returns[index]).square().mean()
                self.optimizer.zero_grad()
                (policy_loss + value_loss).backward()
                nn.utils.clip_grad_norm_(self.parameters, 0.5)
                self.optimizer.step()


# Measuring


def calibrate(clock: Callable[[], float]) -> float:
    """Seconds of a fixed workload of interpreted code and small matrix products, as in training."""
    a = np.ones((64, 64), np.float32)
    start = clock()
    for _ in range(400):
        a = np.tanh(a @ a)
        sum(range(100))
    return clock() - start


def take_turns(
    contenders: Mapping[str, Callable[[], None] | None], rounds: int, clock: Callable[[], float] = time.process_time
) -> dict[str, list[float]]:
    """The time of each contender's turn in each round, in units of the calibrations before and after it."""
    present = {name: turn for name, turn in contenders.items() if turn is not None}
    for turn in present.values():
        turn()
    times: dict[str, list[float]] = {name: [] for name in present}
    for _ in range(rounds):
        for name in np.random.permutation(list(present)):
            before, start = calibrate(clock), clock()
            present[name]()
            taken = clock() - start
            times[name].append(taken / (before + calibrate(clock)) * 2)
    return times


def ratios(times: dict[str, list[float]], reference: str = "SB3") -> dict[str, dict[str, Any]]:
    """The speed-up of each contender over the reference, with its confidence interval."""
    rng, summary = np.random.default_rng(0), {}
    for name in times:
        if name != reference:
            each = np.array(times[reference]) / np.array(times[name])
            medians = np.median(rng.choice(each, (2000, len(each))), axis=1)
            low, high = np.quantile(medians, [0.025, 0.975])
            summary[name] = dict(ratio=float(np.median(each)), low=float(low), high=float(high), rounds=each.tolist())
    return summary


def contests(part: str) -> Iterator[tuple[str, Mapping[str, Callable[[], None] | None]]]:
    """The comparisons of a part: their names, and the contenders that run in turns."""
    if part == "main":
        for name, setting in MAIN.items():
            yield name, main_contenders(name, setting)
    elif part == "policies":
        for name, (setting, options) in POLICIES.items():
            ours = trainer(PPOExt, setting, setting.make_env(), **options)
            yield name, {"SB3": trainer(PPO, setting, setting.make_env()), "PPOExt": ours}
        normalised = trainer(PPO, DEFAULT, VecNormalize(DEFAULT.make_env()))
        yield "default", {"SB3": normalised, "PPOExt": trainer_of_default()}
    elif part == "growth":
        for setting in map(growing, (1, 8, 64, 256)):
            both = {"SB3": trainer(PPO, setting, setting.make_env()), "PPOExt": trainer(PPOExt, setting, setting.make_env())}
            fast = trainer(PPOExt, setting, setting.make_env(FastDummyVecEnv))
            yield f"{setting.n_envs} environments", {**both, "PPOExt, FastDummyVecEnv": fast}
    elif part == "compile":
        for name, setting in COMPILED.items():
            both = {"SB3": trainer(PPO, setting, setting.make_env()), "PPOExt": trainer(PPOExt, setting, setting.make_env())}
            yield name, {**both, "compile": trainer(PPOExt, setting, setting.make_env(), backend="compile")}


def measure(parts: list[str], rounds: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for part in (part for part in (*PARTS, THREADS_PART) if part in parts):
        if part == "startup":
            yield from (("startup", what, found) for what, found in startup().items())
        elif part == "profile":
            yield from (("profile", name, found) for name, found in profiles(rounds // 2 + 1))
        elif part == THREADS_PART:
            for name, setting, updates in THREADS:
                turns = {f"{n} threads": trainer_in_threads(setting, updates, native_threads=n) for n in (1, 2)}
                yield part, name, ratios(take_turns(turns, rounds, time.perf_counter), "1 threads")
        for name, contenders in contests(part):
            yield part, name, ratios(take_turns(contenders, rounds))


def profiles(rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    def watch(algorithm: type, setting: Setting, env: VecEnv | None = None) -> profile.Stopwatch:
        return profile.Stopwatch(make(algorithm, setting, env or setting.make_env()), setting.steps)

    both = {"SB3": PPO, "PPOExt": PPOExt}
    pairs = {name: {label: watch(cls, setting) for label, cls in both.items()} for name, setting in MAIN.items()}
    yield "minibatch", profile.minibatches(pairs["b"]["SB3"], pairs["b"]["PPOExt"], rounds)
    yield "operations", profile.throughput(pairs["b"]["PPOExt"].model.policy, rounds)
    pairs["d, VectorEnvAdapter"] = {label: watch(cls, MAIN["d"], all_in_one_call(MAIN["d"])) for label, cls in both.items()}
    yield "shares", {name: profile.shares(pair, rounds) for name, pair in pairs.items()}
    yield "images", profile.images(watch(PPO, POLICIES["CNN"][0]), rounds)


# Each runs in a process of its own; `%s` is the module of the algorithm
IMPORT = "import time; t = time.perf_counter(); import %s; print(time.perf_counter() - t)"
FIRST_UPDATE = """
import time, torch; torch.set_num_threads(1)
from {module} import {name}; from stable_baselines3.common.env_util import make_vec_env
model = {name}("MlpPolicy", make_vec_env("CartPole-v1", 8), n_steps=32, batch_size=256, device="cpu")
t = time.perf_counter(); model.learn(256); print(time.perf_counter() - t)
"""
MEMORY = r"""
import re, torch; torch.set_num_threads(1)
from {module} import {name}; from stable_baselines3.common.env_util import make_vec_env
model = {name}("MlpPolicy", make_vec_env("{env}", {n_envs}), device="cpu", **{options}).learn({steps})
print(int(re.search(r"VmHWM:\s*(\d+)", open("/proc/self/status").read())[1]) / 1024)
"""


def startup(repeats: int = 5) -> dict[str, Any]:
    """The minimum over fresh processes, in turns, whose modules are already compiled to bytecode."""
    bytecode = tempfile.TemporaryDirectory()
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode.name, "PYTHONDONTWRITEBYTECODE": ""}
    algorithms = {"SB3": ("stable_baselines3", "PPO"), "PPOExt": ("sb3_ppo_ext", "PPOExt")}
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(repeats):
        for label, (module, name) in algorithms.items():
            kwargs = dict(module=module, name=name)
            scripts = {"import, s": IMPORT % module, "first rollout and update, s": FIRST_UPDATE.format(**kwargs)}
            for setting, s in MAIN.items():
                scripts[f"peak memory, {setting}, MB"] = MEMORY.format(
                    env=s.env, n_envs=s.n_envs, options=s.options, steps=s.steps, **kwargs
                )
            for what, script in scripts.items():
                command = [sys.executable, "-W", "ignore", "-c", script]
                printed = subprocess.run(command, capture_output=True, check=True, env=environment).stdout
                found.setdefault(what, {}).setdefault(label, []).append(float(printed.split()[-1]))
    return {what: {label: min(values) for label, values in of.items()} for what, of in found.items()}


def compare_with(revision: str, rounds: int) -> list[str]:
    """The configurations in which the working tree is slower than a revision."""
    cases = {name: {key: value for key, value in vars(setting).items() if key != "wrapper"} for name, setting in MAIN.items()}
    slower = []
    with against.trainers_against(revision) as turns:
        for name, times in against.compare(cases, turns, rounds):
            result = ratios(times, against.REVISION)
            show("main", name, result)
            slower += [name] if against.is_slower(result[against.TREE]) else []
    return slower


# Report


def show(part: str, name: str, results: dict[str, Any]) -> None:
    print(f"\n{part}, {name}", flush=True)
    if part in (*IN_RATIOS, THREADS_PART):
        for contender, result in results.items():
            print(f"  {contender}: {result['ratio']:.2f} ({result['low']:.2f} to {result['high']:.2f})", flush=True)
    else:
        print(*tables({part: {name: results}}), flush=True)


def plot(results: dict[str, dict[str, Any]], path: Path) -> None:
    import matplotlib as mpl
    import matplotlib.patches

    mpl.use("agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(STYLE)
    parts = [part for part in IN_RATIOS if part in results]
    contenders = list(dict.fromkeys(name for part in parts for result in results[part].values() for name in result))
    colors = dict(zip([c for c in contenders if c != "PPOExt"], ("C1", "C2", "0.45", "C9", "C4", "C5", "C6"), strict=False))
    colors["PPOExt"] = COLORS["PPOExt"]
    figure, axes = plt.subplots(len(parts), 1, figsize=(7.2, 3.6 * len(parts)), squeeze=False, layout="constrained")
    for ax, part in zip(axes[:, 0], parts, strict=True):
        shown = [name for name in contenders if any(name in result for result in results[part].values())]
        height = 0.8 / len(shown)
        for i, contender in enumerate(shown):
            rows = [(y, result[contender]) for y, result in enumerate(results[part].values()) if contender in result]
            values = np.array([[r["ratio"], r["low"], r["high"]] for _, r in rows])
            errors = np.abs(values[:, 1:] - values[:, :1]).T
            ax.barh([y + i * height for y, _ in rows], values[:, 0], height, xerr=errors, color=colors[contender])
        ax.set_yticks([y + 0.4 - height / 2 for y in range(len(results[part]))], list(results[part]))
        ax.invert_yaxis()
        ax.axvline(1, color="0.3", lw=1)
        ax.set(xlabel="steps per second, relative to SB3's PPO", title=TITLES[part])
    note = "bars: medians over the rounds; lines: 95 % confidence intervals"
    handles = [mpl.patches.Patch(color=colors[contender], label=contender) for contender in contenders]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, title=note, title_fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def write(path: Path, results: dict[str, Any]) -> None:
    machine = dict(
        processor=platform.processor() or platform.machine(), python=platform.python_version(), torch=th.__version__
    )
    in_order = {part: results[part] for part in PARTS if part in results}
    path.write_text(json.dumps(dict(machine=machine, results=in_order), indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=(*PARTS, THREADS_PART), default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=12, help="number of turns of each contender (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=OUT, help="output folder (default: docs/performance)")
    parser.add_argument("--markdown", action="store_true", help="print the tables of docs/performance.md without measuring")
    parser.add_argument("--against", metavar="REVISION", help="compare the working tree with a revision, and write nothing")
    arguments = parser.parse_args()
    th.set_num_threads(1)
    warnings.simplefilter("ignore")
    if arguments.against is not None:
        slower = compare_with(arguments.against, arguments.rounds)
        sys.exit(f"slower than {arguments.against}: {', '.join(slower)}" if slower else 0)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "benchmark.json"
    results: dict[str, Any] = json.loads(path.read_text())["results"] if path.exists() else {}
    if arguments.markdown:
        print(*tables(results), sep="\n\n")
        return
    measured: dict[str, dict[str, Any]] = {}
    for part, name, result in measure(arguments.parts, arguments.rounds):
        show(part, name, result)
        measured.setdefault(part, {})[name] = result
        results[part] = {**results.get(part, {}), name: result}
        write(path, results)  # at once, so that it stays if the rest is interrupted
    results |= measured  # without older results of what is no longer measured
    write(path, results)
    if any(part in IN_RATIOS for part in results):
        plot(results, arguments.out / "benchmark.svg")


if __name__ == "__main__":
    main()
