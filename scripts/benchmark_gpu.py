"""
How fast PPOExt trains on a GPU: its tests there, and then its rollouts and updates compared with those of SB3, sb3-contrib and
rsl_rl, what the host waits for, and whether `device="auto"` chooses well.

The contenders have the same environments, networks, minibatches, epochs and steps, and run in turns in random order. A turn is
one rollout and one update, each between two points at which the GPU has nothing left to do; the first turns, which compile and
allocate, do not count. A ratio is the median over the rounds. What fails is reported, and the rest continues. The parts:

- tests: `pytest -m gpu`, whose output is in gpu-tests.log
- iterations: 4096 environments of 32 steps, 4 epochs of 4 minibatches: CartPole of gymnax (needs JAX for the GPU), and
  CartPole and Pendulum in PyTorch. SB3's PPO steps them through NumPy. rsl_rl (needs `pip install rsl-rl-lib`) knows
  continuous actions only, and runs without its log
- policies: `CnnPolicy` on images of 84 x 84 x 4, and `MlpTransformerPolicy` next to RecurrentPPO (needs sb3-contrib), in
  environments in NumPy
- waits: for what the host waits, counted by PyTorch's profiler: in the steps of a rollout, as the difference between rollouts
  of two lengths beyond what the environments alone wait for, and in an update
- device: small, wide and convolutional policies on the CPU and on the GPU, and which one `device="auto"` takes

Run it: python scripts/benchmark_gpu.py (less than eight minutes on one GPU; `--parts`, `--rounds`, `--out`). Each part has a
limit of time, after which it leaves out what remains. It writes gpu.json and gpu.md after each contest: nothing is lost
if it is ended. It builds the modules in C in the checkout if they are missing there. `--device cpu --small` runs everything in
miniature on a CPU, where the numbers mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import platform
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeAlias

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take most of the memory.
os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")  # rsl_rl would want the program git.

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv

from sb3_ppo_ext import JaxVecEnv, PPOExt, TorchVecEnv

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from support.torch_envs import TorchCartPole, TorchEnv, TorchPendulum  # noqa: E402

# Seconds of each part
LIMITS = {"tests": 180, "iterations": 130, "policies": 60, "waits": 30, "device": 50}
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")
BUDGET = 10
Result = dict[str, Any]
# A setting and its results by contender, as soon as they are there
Settings: TypeAlias = Iterator[tuple[str, Result]]
Table = list[list[str]]


@dataclass(frozen=True)
class Scale:
    """
    Sizes of what is measured.

    :param n_envs: Number of environments that step in tensors
    :param n_steps: Length of their rollouts
    :param n_images: Number of environments with images
    :param n_memory: Number of environments of policies with a memory
    :param length: Length of rollouts in environments in NumPy
    :param wide: Size of the hidden layers of a wide policy
    """

    n_envs: int = 4096
    n_steps: int = 32
    n_images: int = 64
    n_memory: int = 16
    length: int = 64
    wide: int = 1024


SMALL = Scale(n_envs=16, n_steps=4, n_images=2, n_memory=2, length=8, wide=128)


class Clock:
    """
    Time that is left of a limit.

    :param seconds: The limit
    """

    def __init__(self, seconds: float):
        self.end = time.perf_counter() + seconds

    def is_spent(self, what: str) -> bool:
        """
        :param what: What would take more time
        :return: Whether the limit is reached, which is then said
        """
        spent = time.perf_counter() >= self.end
        if spent:
            print(f"  left out, since the time is spent: {what}", flush=True)
        return spent


# Contenders: one rollout, and one update from it


class Contender(Protocol):
    def collect(self) -> Any:
        """Collect a rollout."""

    def update(self) -> Any:
        """Update the policy from it."""


class Trainer:
    """
    An on-policy algorithm of SB3 or in its style, one iteration at a time.

    :param model: Model that is trained
    """

    def __init__(self, model: Any):
        self.model = model
        _, self.callback = model._setup_learn(10**9)
        self.callback.on_training_start({}, {})

    def collect(self) -> None:
        model = self.model
        model.collect_rollouts(model.env, self.callback, model.rollout_buffer, n_rollout_steps=model.n_steps)

    def update(self) -> None:
        self.model.train()


class ForRslRl:
    """
    Environments in PyTorch with the interface of rsl_rl's.

    :param env: Environments with continuous actions
    """

    def __init__(self, env: TorchEnv):
        self.cfg: dict[str, Any] = {}
        self.env, self.num_envs, self.device = env, env.num_envs, env.device
        self.num_actions = int(np.prod(env.single_action_space.shape))
        self.max_episode_length, self.episode_length_buf = env.max_episode_steps, env.time
        self.observations, _ = env.reset(seed=0)

    def get_observations(self) -> Any:
        from tensordict import TensorDict

        return TensorDict({"policy": self.observations}, batch_size=[self.num_envs])

    def step(self, actions: th.Tensor) -> tuple[Any, th.Tensor, th.Tensor, dict[str, Any]]:
        self.observations, rewards, terminated, truncated, _ = self.env.step(actions)
        return self.get_observations(), rewards, terminated | truncated, {"time_outs": truncated}


@contextmanager
def without_validation() -> Iterator[None]:
    """rsl_rl turns the checks of PyTorch's distributions off for the whole process, and the other contenders have them."""
    th.distributions.Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        th.distributions.Distribution.set_default_validate_args(__debug__)


class RslRl:
    """
    rsl_rl's PPO, without its log.

    :param env: Environments
    :param n_steps: Length of a rollout
    :param device: Device
    """

    def __init__(self, env: ForRslRl, n_steps: int, device: str):
        if find_spec("git") is None:  # which rsl_rl imports for its log
            sys.modules["git"] = ModuleType("git")
        from rsl_rl.runners import OnPolicyRunner

        network: Any = dict(class_name="rsl_rl.models:MLPModel", hidden_dims=[64, 64], activation="tanh")
        network |= dict(obs_normalization=False)
        gaussian = dict(class_name="rsl_rl.modules.distribution:GaussianDistribution", init_std=1.0, std_type="log")
        ppo = dict(class_name="rsl_rl.algorithms:PPO", num_learning_epochs=4, num_mini_batches=4, entropy_coef=0.0)
        ppo |= dict(learning_rate=1e-3, schedule="fixed", normalize_advantage_per_mini_batch=True)
        groups = dict(actor=["policy"], critic=["policy"])
        config = dict(algorithm=ppo, actor={**network, "distribution_cfg": gaussian}, critic=network, obs_groups=groups)
        config |= dict(num_steps_per_env=n_steps, save_interval=10**9, multi_gpu=None)
        with redirect_stdout(io.StringIO()), without_validation():
            self.algorithm: Any = OnPolicyRunner(env, config, log_dir=None, device=device).alg
        self.env, self.n_steps = env, n_steps
        self.algorithm.train_mode()

    def collect(self) -> None:
        with th.inference_mode(), without_validation():
            observations = self.env.get_observations()
            for _ in range(self.n_steps):
                observations, *results = self.env.step(self.algorithm.act(observations))
                self.algorithm.process_env_step(observations, *results)
            self.algorithm.compute_returns(observations)

    def update(self) -> None:
        with without_validation():
            self.algorithm.update()


def tensor_env(name: str, n_envs: int, device: str) -> Any:
    if name == "CartPole of gymnax":
        return JaxVecEnv("CartPole-v1", num_envs=n_envs, device=device)
    return TorchVecEnv((TorchCartPole if "CartPole" in name else TorchPendulum)(n_envs, device=device))


def in_tensors(algorithm: type, env: str, scale: Scale, device: str, **options: Any) -> Trainer:
    n_samples = scale.n_envs * scale.n_steps
    shape: Any = dict(n_steps=scale.n_steps, batch_size=n_samples // 4, n_epochs=4)
    if env == "Pendulum in PyTorch":
        # As in rsl_rl
        shape |= dict(vf_coef=1.0, max_grad_norm=1.0, clip_range_vf=0.2)
        shape |= dict(vf_clip_mode="max") if algorithm is PPOExt else {}
    made = tensor_env(env, scale.n_envs, device)
    return Trainer(algorithm("MlpPolicy", made, learning_rate=1e-3, seed=0, device=device, **shape, **options))


def iteration_contests(scale: Scale, device: str) -> Iterator[tuple[str, dict[str, Callable[[], Contender]]]]:
    for env in ("CartPole of gymnax", "Pendulum in PyTorch", "CartPole in PyTorch"):
        ours = partial(in_tensors, PPOExt, env, scale, device)
        contenders: dict[str, Callable[[], Contender]] = {"SB3": partial(in_tensors, PPO, env, scale, device)}
        contenders["device"] = partial(ours, backend="device")
        if env == "Pendulum in PyTorch":
            contenders["rsl_rl"] = lambda: RslRl(ForRslRl(TorchPendulum(scale.n_envs, device=device)), scale.n_steps, device)
        if env == "CartPole of gymnax":
            contenders["device, bfloat16"] = partial(ours, backend="device", amp_dtype="bfloat16")
            contenders["eager"] = partial(ours, backend="eager")
        if env == "CartPole in PyTorch":
            contenders["compile"] = partial(ours, backend="compile")
        yield env, contenders


def in_numpy(
    algorithm: type, policy: str, make_env: Callable[[], VecEnv], scale: Scale, device: str, **options: Any
) -> Trainer:
    env = make_env()
    n_samples = env.num_envs * scale.length
    model = algorithm(
        policy, env, n_steps=scale.length, batch_size=max(n_samples // 4, 2), n_epochs=4, seed=0, device=device, **options
    )
    return Trainer(model)


def cart_poles(n_envs: int) -> VecEnv:
    return make_vec_env("CartPole-v1", n_envs, seed=0)


def images(n_envs: int) -> VecEnv:
    import benchmark_speed

    return make_vec_env(benchmark_speed.Frames, n_envs, seed=0)


def recurrent(make_env: Callable[[], VecEnv], scale: Scale, device: str) -> Trainer:
    from sb3_contrib import RecurrentPPO

    return in_numpy(RecurrentPPO, "MlpLstmPolicy", make_env, scale, device)


def policy_contests(scale: Scale, device: str) -> Iterator[tuple[str, dict[str, Callable[[], Contender]]]]:
    frames, poles = partial(images, scale.n_images), partial(cart_poles, scale.n_memory)
    ours = partial(in_numpy, PPOExt, "CnnPolicy", frames, scale, device)
    yield (
        "CnnPolicy",
        {
            "SB3": partial(in_numpy, PPO, "CnnPolicy", frames, scale, device),
            "device": partial(ours, backend="device"),
            "device, bfloat16": partial(ours, backend="device", amp_dtype="bfloat16"),
        },
    )
    memory = dict(policy_kwargs=dict(context_length=16))
    yield (
        "MlpTransformerPolicy",
        {
            "RecurrentPPO": partial(recurrent, poles, scale, device),
            "auto": partial(in_numpy, PPOExt, "MlpTransformerPolicy", poles, scale, device, **memory),
        },
    )


# Measuring


def wait_for(device: str) -> None:
    if device != "cpu":
        th.cuda.synchronize()


def seconds_of(phase: Callable[[], Any], device: str) -> float:
    wait_for(device)
    start = time.perf_counter()
    phase()
    wait_for(device)
    return time.perf_counter() - start


def allocated(device: str, peak: bool = False) -> float:
    """Megabytes of PyTorch on the GPU, now or at most since the last call without ``peak``."""
    if device == "cpu":
        return 0.0
    if peak:
        return th.cuda.max_memory_allocated() / 1e6
    th.cuda.reset_peak_memory_stats()
    return th.cuda.memory_allocated() / 1e6


def warmed_up(make: Callable[[], Contender], device: str, results: Result) -> Contender | None:
    """The contender after three turns, or ``None`` if it fails, which the results then say."""
    try:
        before = allocated(device)
        made = make()
        for _ in range(3):
            made.collect()
            made.update()
        wait_for(device)
        results["peak memory, MB"] = round(allocated(device, peak=True) - before, 1)
        return made
    except Exception as error:  # It shall not end the benchmark.
        results["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
        return None


def take_turns(makers: Mapping[str, Callable[[], Contender]], rounds: int, clock: Clock, device: str) -> dict[str, Result]:
    """Seconds of the rollout and update of each contender in each round, and its peak memory."""
    results: dict[str, Result] = {name: {} for name in makers}
    made = {}
    for name, make in makers.items():
        if clock.is_spent(name):
            results[name]["failed"] = "no time left"
        elif (contender := warmed_up(make, device, results[name])) is not None:
            made[name] = contender
    rng = np.random.default_rng(0)
    for n in range(rounds):
        if n > 0 and clock.is_spent(f"{rounds - n} of {rounds} rounds"):
            break
        for name in rng.permutation(list(made)):
            for phase in ("collect", "update"):
                seconds = seconds_of(getattr(made[name], phase), device)
                results[name].setdefault(phase, []).append(seconds)
    made.clear()
    gc.collect()
    if device != "cpu":
        th.cuda.empty_cache()
    return results


def summarised(results: dict[str, Result]) -> dict[str, Result]:
    """Results with medians, and the ratios to the first contender and to rsl_rl."""
    for result in results.values():
        if "update" in result:
            result["iteration"] = [sum(pair) for pair in zip(result["collect"], result["update"], strict=True)]
            for phase in ("collect", "update", "iteration"):
                result[f"{phase}, ms"] = round(1000 * float(np.median(result[phase])), 3)
    for reference in dict.fromkeys((next(iter(results)), "rsl_rl")):
        base = results.get(reference, {})
        for name, result in results.items():
            if name != reference and "update" in base and "update" in result:
                for phase in ("update", "iteration"):
                    each = np.array(base[phase]) / np.array(result[phase])
                    result[f"{phase}, times {reference}"] = round(float(np.median(each)), 2)
    for result in results.values():
        for phase in ("collect", "update", "iteration"):
            result.pop(phase, None)
    return results


# Parts: each yields its results, by setting and contender


def run_tests(scale: Scale, device: str, rounds: int, clock: Clock, out: Path) -> Settings:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--tb=short", "-p", "no:cacheprovider", "tests/engines"]
    if device != "cpu" and find_spec("xdist"):
        command += ["-n", str(max(1, min(6, (os.cpu_count() or 2) // 2)))]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    path, environment = out / "gpu-tests.log", {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    with path.open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            process.wait(clock.end - time.perf_counter())
            finished = "yes"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            finished = "no, the time is spent"
    lines = path.read_text().splitlines()
    failed = [line.removeprefix("FAILED ")[:200] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if finished != "yes":
        marks = Counter("".join(line.split("[")[0] for line in lines if set(line.split("[")[0].strip()) <= set(".FEsx")))
        lines.append(f"{marks['.']} passed, {marks['F'] + marks['E']} failed, {marks['s']} skipped so far")
    yield "tests", {"pytest -m gpu": {"finished": finished, "summary": lines[-1] if lines else "", "failures": failed}}


def measure_contests(contests: Any, scale: Scale, device: str, rounds: int, clock: Clock, out: Path) -> Settings:
    for name, contenders in contests(scale, device):
        if not clock.is_spent(name):
            print(f"  {name}", flush=True)
            yield name, summarised(take_turns(contenders, rounds, clock, device))


def counted(function: Callable[[], Any], device: str) -> Result:
    """How often the host waits for the GPU while the function runs, and copies from and to it."""
    activities = [th.profiler.ProfilerActivity.CPU]
    if device != "cpu":
        activities.append(th.profiler.ProfilerActivity.CUDA)
    wait_for(device)
    with th.profiler.profile(activities=activities) as profile:
        function()
    counts = Counter({event.key: event.count for event in profile.key_averages()})
    return {
        "waits": sum(counts[name] for name in WAITS),
        "copies to the host": sum(n for name, n in counts.items() if name.startswith("Memcpy DtoH")),
        "copies to the GPU": sum(n for name, n in counts.items() if name.startswith("Memcpy HtoD")),
        ".item()": counts["aten::_local_scalar_dense"],
    }


def steps_alone(env: Any, n_steps: int, device: str) -> Callable[[], None]:
    """A function that steps the environments without a policy."""
    space = env.action_space
    sampled = np.stack([space.sample() for _ in range(env.num_envs)])
    actions = th.as_tensor(sampled, dtype=th.int64 if isinstance(space, spaces.Discrete) else th.float32, device=device)
    env.reset_tensors()
    env.step_tensors(actions)

    def steps() -> None:
        for _ in range(n_steps):
            env.step_tensors(actions)

    return steps


def waits_of(env: str, scale: Scale, device: str) -> dict[str, Result]:
    n = scale.n_steps
    found: dict[str, Result] = {}
    for factor in (1, 2):
        longer = Scale(scale.n_envs, factor * n)
        trainer = in_tensors(PPOExt, env, longer, device, backend="device")
        for _ in range(2):
            trainer.collect()
            trainer.update()
        found[f"rollout of {factor * n} steps"] = counted(trainer.collect, device)
        alone = steps_alone(tensor_env(env, scale.n_envs, device), factor * n, device)
        found[f"{factor * n} steps of the environments alone"] = counted(alone, device)
        if factor == 1:
            found["update"] = counted(trainer.update, device)
    for kind in ("waits", "copies to the host", ".item()"):
        rollout, alone = (
            found[of.format(2 * n)][kind] - found[of.format(n)][kind]
            for of in ("rollout of {} steps", "{} steps of the environments alone")
        )
        found.setdefault(f"{n} further steps, beyond the environments", {})[kind] = rollout - alone
    further, update = found[f"{n} further steps, beyond the environments"], found["update"]
    if device != "cpu":  # There, `.item()` waits for nothing.
        further["within budget"] = "yes" if max(further.values()) <= 0 else "no"
        transfers = max(update["waits"], update["copies to the host"], update[".item()"])
        update["within budget"] = "yes" if transfers <= BUDGET else "no"
    return found


def measure_waits(scale: Scale, device: str, rounds: int, clock: Clock, out: Path) -> Settings:
    for env in ("Pendulum in PyTorch", "CartPole of gymnax"):
        if not clock.is_spent(env):
            print(f"  {env}", flush=True)
            try:
                found = waits_of(env, scale, device)
            except Exception as error:
                found = {"all": {"failed": f"{type(error).__name__}: {error}"[:300]}}
            yield env, found


def measure_devices(scale: Scale, device: str, rounds: int, clock: Clock, out: Path) -> Settings:
    poles, frames = partial(cart_poles, 8), partial(images, 8)
    wide = dict(policy_kwargs=dict(net_arch=[scale.wide, scale.wide]))
    cases: dict[str, tuple[str, Callable[[], VecEnv], dict[str, Any]]] = {
        "MLP 64-64, 8 CartPole": ("MlpPolicy", poles, {}),
        "CNN, 8 images": ("CnnPolicy", frames, {}),
        f"MLP {scale.wide}-{scale.wide}, 8 CartPole": ("MlpPolicy", poles, wide),
    }
    for name, (policy, make_env, options) in cases.items():
        if clock.is_spent(name):
            continue
        print(f"  {name}", flush=True)
        makers = {
            on: partial(in_numpy, PPOExt, policy, make_env, scale, on, **options) for on in dict.fromkeys(("cpu", device))
        }
        results = summarised(take_turns(makers, min(rounds, 3), clock, device))
        taken = PPOExt(policy, make_env(), device="auto", **options).device.type
        measured = {on: result["iteration, ms"] for on, result in results.items() if "iteration, ms" in result}
        fastest = min(measured, key=lambda on: measured[on]) if len(measured) > 1 else "not known"
        results['`device="auto"`'] = {"takes": taken, "fastest": fastest}
        yield name, results


PARTS: dict[str, Callable[[Scale, str, int, Clock, Path], Settings]] = {
    "tests": run_tests,
    "waits": measure_waits,
    "iterations": partial(measure_contests, iteration_contests),
    "policies": partial(measure_contests, policy_contests),
    "device": measure_devices,
}


# Report


def targets(results: Result) -> Table:
    """Target, what was measured, and whether it was reached."""
    lines: Table = []

    def add(what: str, part: str, setting: str, contender: str, key: str, least: float) -> None:
        value = results.get(part, {}).get(setting, {}).get(contender, {}).get(key)
        said = "not measured" if value is None else "reached" if value >= least else "missed"
        lines.append([f"{what} at least {least:g} times ({setting})", "" if value is None else f"{value:g}", said])

    for env in ("CartPole of gymnax", "CartPole in PyTorch"):
        add("update: SB3's", "iterations", env, "device", "update, times SB3", 5)
        add("whole iteration: SB3's through NumPy", "iterations", env, "device", "iteration, times SB3", 20)
    add("update: rsl_rl's", "iterations", "Pendulum in PyTorch", "device", "update, times rsl_rl", 1.5)
    for env, found in results.get("waits", {}).items():
        for name, counts in found.items():
            if "within budget" in counts:
                said = "reached" if counts["within budget"] == "yes" else "missed"
                limit = f"at most {BUDGET} transfers" if name == "update" else "no wait"
                lines.append([f"{name}: {limit} ({env})", f"{counts['waits']}", said])
    for name, found in results.get("device", {}).items():
        rule = found['`device="auto"`']
        if rule["fastest"] != "not known":
            said = "reached" if rule["takes"] == rule["fastest"] else "missed"
            lines.append([f'`device="auto"` is the fastest ({name})', rule["takes"], said])
    return lines


def table(head: list[str], lines: Table) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "/") for cell in row) + " |" for row in rows)


def markdown(machine: Result, results: Result) -> str:
    """All results as tables."""
    parts = ["# PPOExt on a GPU", "; ".join(f"{name}: {value}" for name, value in machine.items())]
    parts += ["## Targets", table(["target", "measured", ""], targets(results))]
    for part, settings in results.items():
        parts.append(f"## {part.capitalize()}")
        for setting, contenders in settings.items():
            keys = list(dict.fromkeys(key for result in contenders.values() for key in result))
            lines = [[name, *(_cell(result.get(key, "")) for key in keys)] for name, result in contenders.items()]
            parts.append(table([setting, *keys], lines))
    return "\n\n".join(parts) + "\n"


def _cell(value: Any) -> str:
    return "; ".join(map(str, value)) if isinstance(value, list) else str(value)


def machine(device: str) -> Result:
    made: Result = {"python": platform.python_version(), "torch": th.__version__, "threads": th.get_num_threads()}
    if device != "cpu":
        made |= {"GPU": th.cuda.get_device_name(), "CUDA": th.version.cuda}
    try:
        import jax

        made["JAX"] = f"{jax.__version__} ({jax.default_backend()})"
    except ImportError:
        made["JAX"] = "not installed"
    return made


def build_in_place() -> bool:
    """
    Build the modules in C in the checkout, from which Python imports the package, unless they are there. What an installation
    has built lies elsewhere.

    :return: Whether it has built them
    """
    if find_spec("sb3_ppo_ext.engines.native._mlp") is not None:
        return False
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True)
    if done.returncode != 0:
        print("the modules in C cannot be built; what needs them is left out", flush=True)
    return done.returncode == 0


def write(results: Result, device: str, out: Path) -> str:
    """Write all results so far; returns them as text."""
    about = machine(device)
    text = markdown(about, results)
    (out / "gpu.json").write_text(json.dumps(dict(machine=about, results=results), indent=1) + "\n")
    (out / "gpu.md").write_text(text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure (default: all)")
    parser.add_argument("--rounds", type=int, default=7, help="largest number of turns (default: %(default)s)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="device of the policies")
    parser.add_argument("--small", action="store_true", help="small sizes and a single round, to see whether it runs")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmark", help="output folder (default: benchmark)")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not th.cuda.is_available():
        parser.error("there is no CUDA; `--device cpu --small` runs everything in miniature")
    if build_in_place():
        os.execv(sys.executable, [sys.executable, *sys.argv])
    warnings.simplefilter("ignore")
    arguments.out.mkdir(parents=True, exist_ok=True)
    scale, rounds = (SMALL, 1) if arguments.small else (Scale(), arguments.rounds)
    results: Result = {}
    text, start = "", time.perf_counter()
    for part in (part for part in PARTS if part in arguments.parts):
        print(part, flush=True)
        found = results[part] = {}
        try:
            for name, result in PARTS[part](scale, arguments.device, rounds, Clock(LIMITS[part]), arguments.out):
                found[name] = result
                write(results, arguments.device, arguments.out)
        except Exception as error:  # The other parts shall be measured nevertheless.
            found[part] = {"all": {"failed": f"{type(error).__name__}: {error}"[:300]}}
        text = write(results, arguments.device, arguments.out)
    print(f"\n{text}\n{time.perf_counter() - start:.0f} seconds")


if __name__ == "__main__":
    main()
