"""What a model and its environments do without an error, and is seldom meant."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.torch_layers import CombinedExtractor
from stable_baselines3.common.vec_env import VecEnv, VecMonitor, is_vecenv_wrapped
from torch import nn

from sb3_ppo_ext.common.guards import find_normalizers, normalized_parts

NO_STATISTICS = (
    "Episodes end, but the infos have no statistics of them, so that no returns are logged: make the environments with "
    "`make_vec_env`, or wrap them in SB3's `Monitor` or `VecMonitor`."
)


def advice_on(model: OnPolicyAlgorithm) -> Iterator[str]:
    """
    :param model: Model whose environments have just been reset
    :return: Messages, each with a remedy
    """
    space = model.action_space
    if isinstance(space, spaces.Box) and np.dtype(space.dtype).kind in "iub":
        yield (
            f"The action space is a Box of integers ({space.dtype}), and policies sample real numbers, which the environment "
            "gets as they are, as in SB3: give it a MultiDiscrete, or a Box of floats, and let the environment round."
        )
    for normalizer in find_normalizers(model.env):
        if normalizer.norm_reward and normalizer.gamma != model.gamma:
            yield (
                f"VecNormalize scales rewards by returns with gamma={normalizer.gamma}, and the model has gamma="
                f"{model.gamma}: give both the same, or `norm_reward=False`."
            )
    yield from _flattened_images(model)


def _flattened_images(model: Any) -> Iterator[str]:
    extractor = model.policy.features_extractor
    if type(extractor) is not CombinedExtractor or not isinstance(model._last_obs, dict):
        return
    for key, part in extractor.extractors.items():
        space = model.env.observation_space[key]
        if not isinstance(part, nn.Flatten) or not isinstance(space, spaces.Box) or len(space.shape) != 3:
            continue
        if key in normalized_parts(model.env):
            yield (
                f"The images {key!r} are normalised by VecNormalize, and then flattened: give it `norm_obs_keys` without "
                "them, or `policy_kwargs=dict(features_extractor_kwargs=dict(normalized_image=True))` for convolutions."
            )
        elif (model._last_obs[key] > space.high).any():
            yield (
                f"The images {key!r} have numbers beyond their space, which is {space.dtype} up to {space.high.max()}, and "
                "are flattened: if a VecNormalize has written into the space since it belongs to the class of the "
                "environment, make the space in `__init__`, one for each environment."
            )


def say_once(model: Any, message: str) -> None:
    """
    Warn, unless this model has said the same before.

    :param model: Model
    :param message: Message, with a remedy
    """
    if message not in model._said:
        model._said |= {message}
        warnings.warn(message, stacklevel=3)


def has_monitor(env: VecEnv) -> bool:
    """
    :param env: Vectorised environments, with their wrappers
    :return: Whether a ``Monitor`` or ``VecMonitor`` counts episodes, which may be longer than what ends
    """
    return is_vecenv_wrapped(env, VecMonitor) or any(env.env_is_wrapped(Monitor))
