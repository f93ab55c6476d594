"""
Whether `device="auto"` chooses well, predicted without a GPU: ten typical models in environments in NumPy, whose steps cost
nothing.

An iteration, one rollout and one update, is measured on the CPU with the engine that PPOExt takes there. What it would take on
CUDA is predicted from its parts: operations, arithmetic and memory traffic are counted in an iteration with
`backend="device"`, and the time that PyTorch spends on an operation besides computing is measured on this machine with tiny
tensors. The rest is assumed, see `CARD`: the numbers of a mid-range card, of which half is reached. Nothing of the column for
CUDA was measured on a GPU.

Run it: python scripts/predict_device.py (four minutes; it prints the table of docs/performance.md)
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.algorithm.device_choice import Situation, choose_device


class Card(NamedTuple):
    """
    What is assumed of a GPU, in seconds, operations and bytes per second.

    :param launch: Time of the host for a launch, besides PyTorch's own
    :param wait: Time until the host knows that the GPU has finished, and a copy of a few numbers
    :param arithmetic: Operations per second
    :param memory: Bytes per second from and to its memory
    :param bus: Bytes per second from and to the host
    """

    launch: float = 3e-6
    wait: float = 20e-6
    arithmetic: float = 10e12
    memory: float = 250e9
    bus: float = 10e9


CARD = Card()
TINY = dict(net_arch=[2], ortho_init=False)
IMAGES = spaces.Box(0, 255, (4, 84, 84), np.uint8)
VECTORS = spaces.Box(-1, 1, (17,), np.float32)
TRANSFORMER = dict(context_length=16, d_model=256, n_heads=4, n_layers=4)
# Policy, its keywords, number of environments, steps, size of a minibatch, epochs
MODELS: dict[str, tuple[str, dict[str, Any], int, int, int, int]] = {
    "`MlpPolicy`, SB3's defaults": ("MlpPolicy", {}, 1, 2048, 64, 10),
    "8 environments": ("MlpPolicy", {}, 8, 256, 64, 10),
    "256-256": ("MlpPolicy", dict(net_arch=[256, 256]), 8, 256, 64, 10),
    "256-256, large minibatches": ("MlpPolicy", dict(net_arch=[256, 256]), 64, 128, 2048, 10),
    "512-256-128, 1024 environments": ("MlpPolicy", dict(net_arch=[512, 256, 128]), 1024, 24, 6144, 5),
    "1024-1024": ("MlpPolicy", dict(net_arch=[1024, 1024]), 8, 256, 256, 10),
    "`CnnPolicy`, 84 x 84 x 4": ("CnnPolicy", {}, 8, 128, 256, 4),
    "`MlpLstmPolicy`": ("MlpLstmPolicy", {}, 8, 128, 128, 10),
    "`MlpTransformerPolicy`": ("MlpTransformerPolicy", {}, 8, 256, 256, 10),
    "the same with 4 layers of 256": ("MlpTransformerPolicy", TRANSFORMER, 64, 128, 1024, 4),
}


class Idle(DummyVecEnv):
    """Environments whose steps cost nothing: all observations are the same."""

    def __init__(self, n_envs: int, space: spaces.Box):
        VecEnv.__init__(self, n_envs, space, spaces.Box(-1, 1, (6,), np.float32))
        self.observations = np.stack([space.sample() for _ in range(n_envs)])
        self.age = 0

    def reset(self) -> Any:
        return self.observations

    def seed(self, seed: int | None = None) -> Any:
        return [seed] * self.num_envs

    def step_async(self, actions: np.ndarray) -> None:
        self.age += 1

    def step_wait(self) -> Any:
        dones = np.full(self.num_envs, self.age % 1000 == 0)
        return self.observations, np.ones(self.num_envs, np.float32), dones, [{} for _ in range(self.num_envs)]

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self, attr_name)] * self.num_envs

    def close(self) -> None:
        pass


class Count(TorchDispatchMode):
    """Counts the operations that would start a kernel, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.n_operations, self.n_bytes = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not function.is_view:
            self.n_operations += 1
            tensors = [part for part in (*args, result) if isinstance(part, th.Tensor)]
            self.n_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return result


class Iteration:
    """
    Rollouts and updates of a model.

    :param name: Name in ``MODELS``
    :param backend: Backend
    :param scale: Divides the number of steps; the number of epochs is 1 if it is more than 1
    """

    def __init__(self, name: str, backend: str, scale: int = 1, policy_kwargs: dict[str, Any] | None = None):
        policy, keywords, n_envs, n_steps, batch_size, n_epochs = MODELS[name]
        env = Idle(n_envs, IMAGES if policy == "CnnPolicy" else VECTORS)
        self.observations = env.observations
        epochs = n_epochs if scale == 1 else 1
        options: dict[str, Any] = dict(n_steps=n_steps // scale, batch_size=batch_size, n_epochs=epochs, backend=backend)
        self.model = PPOExt(policy, env, device="cpu", policy_kwargs=policy_kwargs or keywords, seed=0, **options)
        _, self.callback = self.model._setup_learn(10**9)
        self.callback.on_training_start(locals(), globals())

    def collect(self) -> None:
        model = self.model
        assert model.env is not None
        model.collect_rollouts(model.env, self.callback, model.rollout_buffer, model.n_steps)

    def seconds(self) -> float:
        """Shortest of three iterations in CPU time of one thread, after one that allocates."""
        times = []
        for _ in range(4):
            start = time.process_time()
            self.collect()
            self.model.train()
            times.append(time.process_time() - start)
        return min(times[1:])


@contextmanager
def counted() -> Iterator[tuple[Count, FlopCounterMode]]:
    with FlopCounterMode(display=False) as arithmetic, Count() as count:
        yield count, arithmetic


def overhead() -> float:
    """Seconds that PyTorch spends on an operation of an update besides computing."""
    one = Iteration("8 environments", "device", policy_kwargs=TINY)
    one.collect()
    one.model.train()
    start = time.process_time()
    one.model.train()
    seconds = time.process_time() - start
    with counted() as (count, _):
        one.model.train()
    return seconds / count.n_operations


def predicted(name: str, per_operation: float) -> float:
    """Seconds of an iteration on CUDA."""
    *_, n_steps, _, n_epochs = MODELS[name]
    scale = 4  # A quarter of the steps and one epoch are counted.
    one = Iteration(name, "device", scale)
    one.collect()
    one.model.train()
    total = 0.0
    for part, times in ((one.collect, scale), (one.model.train, scale * n_epochs)):
        with counted() as (count, arithmetic):
            part()
        computing = arithmetic.get_total_flops() / CARD.arithmetic + count.n_bytes / CARD.memory
        total += times * max(count.n_operations * (per_operation + CARD.launch), computing)
    n_bytes = one.observations.nbytes
    return total + n_steps * (2 * CARD.wait + n_bytes / CARD.bus)


def chosen(model: PPOExt) -> str:
    """What `device="auto"` would choose where there is a GPU."""
    engine, _ = model._choose_backend()
    with patch("torch.cuda.is_available", return_value=True):
        return choose_device(Situation(model.policy, model.env, engine == "native", batch_size=model.batch_size)).device.type


def main() -> None:
    th.set_num_threads(1)
    per_operation = overhead()
    print(f"an operation besides computing: {per_operation * 1e6:.1f} µs\n")
    header = ("model", "parameters", "CPU, measured [s]", "CUDA, predicted [s]", "ratio", '`device="auto"`')
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for name in MODELS:
        one = Iteration(name, "auto")
        n_parameters = sum(parameter.numel() for parameter in one.model.policy.parameters())
        on_cpu, on_cuda = one.seconds(), predicted(name, per_operation)
        cells = (name, f"{n_parameters:,}", f"{on_cpu:.2f}", f"{on_cuda:.2f}", f"{on_cpu / on_cuda:.1f}", chosen(one.model))
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
