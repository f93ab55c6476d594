"""Samples of action distributions, by the extension module where NumPy takes long."""

from __future__ import annotations

from functools import partial

import numpy as np

from sb3_ppo_ext.common.type_aliases import Arrays
from sb3_ppo_ext.distributions import NumpyDistribution
from sb3_ppo_ext.distributions.base import Sampler
from sb3_ppo_ext.distributions.beta import NumpyBeta
from sb3_ppo_ext.distributions.beta import sample_beta as sample_beta_in_arrays
from sb3_ppo_ext.engines.native import extension


def sampler_of(distribution: NumpyDistribution) -> Sampler | None:
    """
    :param distribution: Action distribution
    :return: Its ``sampler``, or a function with the same results to rounding
    """
    if type(distribution) is NumpyBeta:
        return partial(sample_beta, max_concentration=distribution.distribution.max_concentration)
    return distribution.sampler()


def sample_beta(outputs: Arrays, noise: Arrays, max_concentration: float) -> Arrays:
    """
    Arrays of JAX, which the extension module cannot read, are those of a rollout that is being compiled.

    :param outputs: Outputs of the output layer, shape ``(n, 2 * action_dim)``
    :param noise: Noise of ``NumpyBeta``, shape ``(n, 2, 2, action_dim, rounds)``
    :param max_concentration: Upper limit of ``alpha + beta - 2``
    :return: Samples, shape ``(n, action_dim)``
    """
    if not isinstance(outputs, np.ndarray):
        return sample_beta_in_arrays(outputs, noise, max_concentration)
    samples = np.empty((len(outputs), outputs.shape[1] // 2), np.float32)
    extension.module.sample_beta(outputs, np.ascontiguousarray(noise), max_concentration, samples)
    return samples
