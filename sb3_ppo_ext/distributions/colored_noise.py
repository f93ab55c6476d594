"""
Gaussian action noise that is correlated over time (option ``noise_color``): its power at the frequency f goes as ``1/f^beta``.

Paper: https://arxiv.org/abs/2312.11091. It makes sequences of some length by a Fourier transform. This noise has no end: it is
fractional noise of order ``beta / 2`` (https://doi.org/10.1093/biomet/68.1.165), a weighted sum of the last white numbers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.distributions import DiagGaussianDistribution
from torch.nn import functional as F

from sb3_ppo_ext.common.validation import BadArgumentError
from sb3_ppo_ext.distributions.squashed_gaussian import TanhGaussianDistribution

# Number of white numbers in a sum. The others would have 1 % of the variance for beta = 0.5.
N_TERMS = 128


def weights(beta: float) -> np.ndarray:
    """
    :param beta: Exponent of the power, from 0 (white) to 2
    :return: Weights of a white number and of those before it, shape ``(N_TERMS,)``, with squares that sum up to 1: each sum is
        standard normal
    """
    terms = np.ones(N_TERMS)
    for k in range(1, N_TERMS):
        terms[k] = terms[k - 1] * (k - 1 + beta / 2) / k
    return terms / np.sqrt(np.square(terms).sum())


def colored(white: th.Tensor, beta: float) -> th.Tensor:
    """
    :param white: Standard normal numbers of successive steps, shape ``(N_TERMS - 1 + n_steps, *shape)``
    :param beta: Exponent of the power
    :return: Correlated standard normal numbers of the last ``n_steps`` steps, shape ``(n_steps, *shape)``
    """
    backwards = th.from_numpy(weights(beta)[::-1].copy()).to(white)
    sums = F.conv1d(white.flatten(1).T.unsqueeze(1), backwards.view(1, 1, -1))
    return sums.squeeze(1).T.reshape(-1, *white.shape[1:])


def gaussian_part(distribution: object) -> DiagGaussianDistribution | TanhGaussianDistribution | None:
    """
    :param distribution: Action distribution of a policy
    :return: The Gaussian, squashed or not, that samples it or the ``Box`` parts of a hybrid one; ``None`` if none does
    """
    part = getattr(distribution, "continuous", distribution)
    return part if isinstance(part, DiagGaussianDistribution | TanhGaussianDistribution) else None


@contextmanager
def sampling_with(owner: Any, noise: th.Tensor | None) -> Iterator[None]:
    """
    Let a policy sample with given noise. The density of its actions stays that of white noise.

    :param owner: What has the distribution as ``action_dist``, for which :func:`gaussian_part` is not ``None``
    :param noise: Standard normal numbers of one step, shape ``(n_envs, n)``, ``None`` for fresh ones
    :raises ValueError: if the policy samples in a way of its own
    """
    if noise is None:
        yield
        return

    is_used = False

    def sample() -> th.Tensor:
        nonlocal is_used
        is_used = True
        normal = current().distribution
        return normal.mean + normal.stddev * noise

    def current() -> Any:
        # A hybrid distribution replaces its parts by copies at each call.
        return gaussian_part(owner.action_dist)

    current().sample = sample
    try:
        yield
    finally:
        del current().sample
    if not is_used:
        remedy = "does not sample by `get_actions` of its distribution, so that this has no effect; let it, or give 0"
        raise BadArgumentError(f"`noise_color` is not valid: {type(owner).__name__} {remedy}")
