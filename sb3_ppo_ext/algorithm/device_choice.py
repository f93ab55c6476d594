"""The device that ``device="auto"`` stands for: the one where the policy is trained fastest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch as th
from torch import nn

# Number of parameters above which a policy is taken to be faster on a GPU, although each step of the environments waits for
# it. It is that of two layers with 1024 inputs and outputs.
WIDE = 2 * 1024**2
# Number of products of a parameter and a sample in a minibatch above which updates are taken to be faster on a GPU, although
# the native engine needs less time around them. `scripts/predict_device.py` predicts it.
MUCH = 10**9

# Backends that use the extension module in C
OF_CPU = ("native", "fused")

_CPU, _CUDA = th.device("cpu"), th.device("cuda")


class Situation(NamedTuple):
    """
    What the choice of the device depends on.

    :param policy: Policy that is trained
    :param env: Vectorised environment, ``None`` if there is none
    :param is_native: Whether the native engine would compute the policy on the CPU
    :param backend: Backend that the user has chosen
    :param batch_size: Size of a minibatch
    """

    policy: nn.Module
    env: Any
    is_native: bool
    backend: str = "auto"
    batch_size: int = 64


class DeviceChoice(NamedTuple):
    """
    A device, and why it was chosen.

    :param device: The device
    :param reason: The reason, the end of a sentence that begins with the device
    """

    device: th.device
    reason: str


class _Rule(NamedTuple):
    applies: Callable[[Situation], bool]
    device: Callable[[Situation], th.device]
    reason: str


def choose_device(situation: Situation) -> DeviceChoice:
    """
    :param situation: What is trained where
    :return: Fastest device, and the reason
    """
    rule = next(rule for rule in RULES if rule.applies(situation))
    return DeviceChoice(rule.device(situation), rule.reason)


def _steps_on_device(situation: Situation) -> bool:
    # A wrapper forwards all attributes, but steps in arrays.
    return hasattr(type(situation.env), "step_tensors") and _device_of_steps(situation).type != "cpu"


def _device_of_steps(situation: Situation) -> th.device:
    return th.device(situation.env.device)


def _has_convolutions(situation: Situation) -> bool:
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return any(isinstance(module, convolutions) for module in situation.policy.modules())


def _is_wide(situation: Situation) -> bool:
    return _n_parameters(situation) > WIDE


def _computes_much(situation: Situation) -> bool:
    return _n_parameters(situation) * situation.batch_size > MUCH


def _n_parameters(situation: Situation) -> int:
    return sum(parameter.numel() for parameter in situation.policy.parameters())


# The first one that applies counts.
RULES = (
    _Rule(_steps_on_device, _device_of_steps, "the environments step there"),
    _Rule(lambda situation: not th.cuda.is_available(), lambda situation: _CPU, "there is no CUDA"),
    _Rule(lambda situation: situation.backend in OF_CPU, lambda situation: _CPU, "`backend` computes only there"),
    _Rule(lambda situation: situation.backend == "device", lambda situation: _CUDA, '`backend` is "device"'),
    _Rule(_has_convolutions, lambda situation: _CUDA, "the policy reads images"),
    _Rule(_is_wide, lambda situation: _CUDA, "the policy has wide layers"),
    _Rule(_computes_much, lambda situation: _CUDA, "its minibatches are large"),
    _Rule(lambda situation: situation.is_native, lambda situation: _CPU, "the native engine computes this policy there"),
    _Rule(lambda situation: True, lambda situation: _CPU, "a GPU would be slower for such a small policy"),
)
