"""
A profile of where the time is spent: the part ``profile`` of ``benchmark_speed.py``.

The contenders run in turns. Shares are medians over the rounds, times are minima, because other processes of the machine can
only make them longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.torch_layers import NatureCNN
from torch.utils.flop_counter import FlopCounterMode

from sb3_ppo_ext.engines.native import _mlp
from sb3_ppo_ext.engines.native.policy import NativePolicy

SIZES = (3, 64, 64, 1)
BATCH, LARGE_BATCH, FRAMES = 64, 2048, 256
WHAT = ("environment", "update", "the rest")
Parts = dict[str, Callable[[], Any]]


class Stopwatch:
    """
    Trains a model turn by turn and measures where the time is spent.

    :param model: Model whose environment and ``train`` are timed from now on
    :param steps: Number of timesteps of a turn
    """

    def __init__(self, model: Any, steps: int):
        self.model, self.steps = model, steps
        self.spent = {"environment": 0.0, "update": 0.0}
        self.model.env.step = self._timed("environment", self.model.env.step)
        self.model.train = self._timed("update", self.model.train)

    def _timed(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            returned = function(*args)
            self.spent[what] += time.perf_counter() - start
            return returned

        return timed

    def turn(self) -> dict[str, float]:
        """:return: Seconds of a turn for each part, and in total as ``all``"""
        before, start = dict(self.spent), time.perf_counter()
        self.model.learn(self.steps, reset_num_timesteps=False)
        everything = time.perf_counter() - start
        taken = {what: self.spent[what] - before[what] for what in before}
        return {**taken, "the rest": everything - sum(taken.values()), "all": everything}

    def minibatch(self) -> float:
        """:return: Seconds per minibatch of the updates of a turn"""
        buffer = self.model.rollout_buffer
        per_rollout = buffer.buffer_size * buffer.n_envs
        n_rollouts = -(-self.steps // per_rollout)
        return self.turn()["update"] / (n_rollouts * self.model.n_epochs * -(-per_rollout // self.model.batch_size))


def seconds(function: Callable[[], Any], calls: int) -> float:
    """Seconds per call."""
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls


def least(measurements: Mapping[Any, Callable[[], float]], rounds: int) -> dict[Any, float]:
    """The minimum of each measurement over the rounds."""
    found: dict[Any, list[float]] = {name: [] for name in measurements}
    for _ in range(rounds):
        for name, measure in measurements.items():
            found[name].append(measure())
    return {name: min(each) for name, each in found.items()}


def shares(models: Mapping[str, Stopwatch], rounds: int) -> dict[str, float]:
    """Shares of the time of each model: environment, update, and the rest."""
    for watch in models.values():
        watch.turn()
    found = []
    for _ in range(rounds):
        turns = {name: watch.turn() for name, watch in models.items()}
        found.append({f"{name}, {what}": turns[name][what] / turns[name]["all"] for name in turns for what in WHAT})
    return {name: float(np.median([each[name] for each in found])) for name in found[0]}


# The extension module


def parts_of_a_minibatch(policy: Any, n: int) -> Parts:
    """The parts that the module computes for a minibatch, each for both networks."""
    native, rng = NativePolicy(policy), np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    networks = [net.network for net in native.networks]
    features, outputs, gradients = normal(n, SIZES[0]), [normal(n, 1) for _ in networks], [normal(n, 1) for _ in networks]
    adam = _mlp.Adam([(p.detach().numpy(), g, np.zeros_like(g), np.zeros_like(g)) for p, g in native.parameters()])
    return {
        "forward": lambda: [net.forward(features, out) for net, out in zip(networks, outputs, strict=True)],
        "backward": lambda: [net.backward(d_out, False) for net, d_out in zip(networks, gradients, strict=True)],
        # With a learning rate of 0, so that the parameters do not change
        "Adam": lambda: adam.step(1, 1.0, 0.0, 0.9, 0.999, 1e-5, 0.0),
        "transposed copies of the weights": lambda: [net.pack() for net in networks],
        "norm of the gradients": adam.norm,
    }


def operations(n: int) -> dict[str, float]:
    """Numbers of multiplications and additions in the matrix products of both networks. The input needs no gradient."""
    products = [2 * 2 * n * n_in * n_out for n_in, n_out in pairwise(SIZES)]
    return {"forward": sum(products), "backward": 2 * sum(products) - products[0]}


def products_in_torch(n: int = BATCH) -> Callable[[], None]:
    """The matrix products of a minibatch for both networks, without anything else."""
    with th.no_grad():
        layers = [(th.randn(n, i), th.randn(o, i), th.randn(n, o)) for i, o in pairwise(SIZES)] * 2
        pairs = [pair for x, weight, delta in layers for pair in ((x, weight.T), (delta.T, x))]
        pairs += [(delta, weight) for x, weight, delta in layers if x.shape[1] != SIZES[0]]
        targets = [(a, b, a @ b) for a, b in pairs]

    def multiply() -> None:
        with th.no_grad():
            for a, b, out in targets:
                th.mm(a, b, out=out)

    return multiply


def using(instruction_set: str, measure: Callable[[], float]) -> Callable[[], float]:
    def measured() -> float:
        _mlp.use(instruction_set)
        try:
            return measure()
        finally:
            _mlp.use(_mlp.available()[0])

    return measured


def minibatches(sb3: Stopwatch, ext: Stopwatch, rounds: int) -> dict[str, dict[str, float]]:
    """
    :param sb3: PPO on the setting **b**, whose minibatches have 64 samples with three inputs and one action
    :param ext: PPOExt on the same setting
    :param rounds: Number of rounds
    :return: Microseconds of the parts of a minibatch, for each instruction set and for PyTorch
    """
    parts = parts_of_a_minibatch(deepcopy(ext.model.policy), BATCH)
    measurements: dict[tuple[str, str], Callable[[], float]] = {}
    for name in _mlp.available():
        measurements |= {(name, part): using(name, partial(seconds, parts[part], 300)) for part in parts}
        measurements[name, "all"] = using(name, ext.minibatch)
    measurements["PyTorch", "all"] = sb3.minibatch
    measurements["PyTorch", "of which matrix products"] = partial(seconds, products_in_torch(), 300)
    taken = least(measurements, rounds)
    results: dict[str, dict[str, float]] = {}
    for name in _mlp.available():
        own = {part: 1e6 * taken[name, part] for part in parts}
        whole = 1e6 * taken[name, "all"]
        results[name] = {**own, "loss, its gradient, and gathering": whole - sum(own.values()), "all": whole}
    results["PyTorch"] = {what: 1e6 * taken["PyTorch", what] for name, what in taken if name == "PyTorch"}
    return results


def forward_of_a_layer(n: int) -> Callable[[], bool]:
    """The forward pass of a single linear layer with 64 inputs and outputs."""
    weight, bias, x, out = (np.ones(shape, np.float32) for shape in ((64, 64), 64, (n, 64), (n, 64)))
    network = _mlp.Network([(weight, bias, np.zeros_like(weight), np.zeros_like(bias))])
    network.pack()
    return lambda: network.forward(x, out)


def throughput(policy: Any, rounds: int) -> dict[str, dict[str, float]]:
    """Billions of operations per second for each part and instruction set."""
    parts, work = parts_of_a_minibatch(deepcopy(policy), LARGE_BATCH), operations(LARGE_BATCH)
    layer = "a layer of 64-64 by itself, forward"
    parts[layer], work[layer] = forward_of_a_layer(LARGE_BATCH), 2 * LARGE_BATCH * 64 * 64
    sets = _mlp.available()
    taken = least({(name, part): using(name, partial(seconds, parts[part], 10)) for name in sets for part in work}, rounds)
    return {name: {part: work[part] / taken[name, part] / 1e9 for part in work} for name in sets}


# Images


def differentiate(extractor: NatureCNN, images: th.Tensor, dtype: th.dtype = th.float32) -> None:
    with th.autocast("cpu", dtype=dtype, enabled=dtype != th.float32):
        total = extractor(images).float().sum()
    extractor.zero_grad()
    total.backward()


def ways_of_images(channels: int) -> Parts:
    """Forward and backward passes of SB3's features extractor, in several variants."""
    extractor = NatureCNN(spaces.Box(0, 255, (channels, 84, 84), np.uint8))
    images = th.rand(FRAMES, channels, 84, 84)
    last = deepcopy(extractor).to(memory_format=th.channels_last)  # type: ignore[call-overload]
    images_last = images.contiguous(memory_format=th.channels_last)
    return {
        "as SB3": lambda: differentiate(extractor, images),
        "`channels_last`": lambda: differentiate(last, images_last),
        "bfloat16": lambda: differentiate(extractor, images, th.bfloat16),
    }


def images(sb3: Stopwatch, rounds: int) -> dict[str, dict[str, float]]:
    """
    :param sb3: PPO with ``CnnPolicy`` on four frames, in minibatches of 256
    :param rounds: Number of rounds
    :return: For 256 images of one frame and of four frames: the time of SB3's features extractor in several variants, and its
        share of the time of SB3's minibatch
    """
    results = {}
    for channels, name in ((1, "1 frame"), (4, "4 frames")):
        ways = ways_of_images(channels)
        with FlopCounterMode(display=False) as counter:
            ways["as SB3"]()
        work = counter.get_total_flops()
        measurements = {way: partial(seconds, function, 1) for way, function in ways.items()}
        taken = least({**measurements, "SB3's minibatch": sb3.minibatch} if channels == 4 else measurements, rounds)
        result = {f"{what}, ms": 1e3 * value for what, value in taken.items()}
        result |= {f"{way}, 10⁹ operations/s": work / taken[way] / 1e9 for way in ways}
        if channels == 4:
            result["as SB3, share of SB3's minibatch"] = taken["as SB3"] / taken["SB3's minibatch"]
        results[name] = result
    return results
