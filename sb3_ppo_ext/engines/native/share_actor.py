"""The actor of the native engine for some of the environments, in any process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sb3_ppo_ext.common.type_aliases import Arrays
from sb3_ppo_ext.distributions.base import Sampler
from sb3_ppo_ext.engines.native.inputs import Inputs
from sb3_ppo_ext.engines.native.layers import Forward
from sb3_ppo_ext.engines.native.policy import invalid_choices, mask
from sb3_ppo_ext.envs.parallel.share_rollout import ShareActor


@dataclass
class NativeShareActor(ShareActor):
    """
    Computes what :meth:`NativeActor.act` does for some of the environments, bit for bit: the extension module computes the
    outputs for each observation alone, however many there are.

    :param inputs: What the actor network reads of the observations
    :param network: Actor network
    :param mask_key: Key of the masks in the observations, ``None`` for none
    :param noise: Noise, a sequence of arrays whose first dimension is over environments
    :param n_held: Number of steps in which each element of the noise is used
    :param sampler: Function from outputs and noise to samples
    :param sample_shape: Shape of the samples of a step; ``None`` if they have it already
    :param for_env: Function from samples to new actions within the bounds, which can be pickled
    """

    inputs: Inputs
    network: Forward
    mask_key: str | None
    noise: Arrays
    n_held: int
    sampler: Sampler
    sample_shape: tuple[int, ...] | None
    for_env: Callable[[np.ndarray], Arrays]

    def act(self, observations: Arrays, step: int) -> tuple[np.ndarray, Arrays] | None:
        outputs = self.network(self.inputs(observations))
        outputs = mask(outputs, invalid_choices(observations, self.mask_key, self.network.n_outputs))
        samples = self.sampler(outputs, self.noise[step // self.n_held])
        if not (np.isfinite(outputs).all() and np.isfinite(samples).all()):
            return None
        if self.sample_shape is not None:
            samples = samples.reshape(self.sample_shape)
        return samples, self.for_env(samples)
