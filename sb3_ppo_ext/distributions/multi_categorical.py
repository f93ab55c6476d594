"""
SB3's distribution over the actions of a ``MultiDiscrete`` space (``MultiCategoricalDistribution``): one categorical
distribution for each dimension.
"""

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import torch as th
from stable_baselines3.common.distributions import MultiCategoricalDistribution
from torch.distributions import Categorical

from sb3_ppo_ext.common.namespaces import namespace
from sb3_ppo_ext.distributions.base import Sampler
from sb3_ppo_ext.distributions.categorical import divergence, gumbel, largest, log_prob_or_nan, marked, sample_without_wait
from sb3_ppo_ext.distributions.torch_fallback import TorchFallback

SelfMultiCategorical = TypeVar("SelfMultiCategorical", bound="MultiCategoricalOnDevice")


def parameters(distribution: MultiCategoricalDistribution) -> th.Tensor:
    """
    :param distribution: Multi-categorical distribution
    :return: Normalised logits, dimension after dimension, shape ``(batch_size, sum(action_dims))``
    """
    return th.cat([part.logits for part in distribution.distribution], dim=1)


def location(distribution: MultiCategoricalDistribution) -> th.Tensor:
    """
    :param distribution: Multi-categorical distribution
    :return: Probabilities, dimension after dimension, shape ``(batch_size, sum(action_dims))``
    """
    return th.cat([part.probs for part in distribution.distribution], dim=1)


def kl_divergence(old: th.Tensor, new: MultiCategoricalDistribution) -> th.Tensor:
    """
    :param old: :func:`parameters` of a multi-categorical distribution, shape ``(batch_size, sum(action_dims))``
    :param new: Multi-categorical distribution for the same observations
    :return: KL(old || new) in nats, shape ``(batch_size,)``
    """
    parts = zip(old.split(new.action_dims, dim=1), new.distribution, strict=True)
    return th.stack([divergence(logits, part) for logits, part in parts]).sum(dim=0)


def largest_of_each(outputs: np.ndarray, noise: np.ndarray, ends: Sequence[int]) -> np.ndarray:
    """
    :param outputs: Logits, dimension after dimension, shape ``(n, sum(action_dims))``
    :param noise: Gumbel noise, the same shape
    :param ends: Where the logits of each dimension but the last one end
    :return: Samples, shape ``(n, len(action_dims))``
    """
    xp = namespace(outputs)
    pairs = zip(xp.split(outputs, ends, axis=1), xp.split(noise, ends, axis=1), strict=True)
    samples: np.ndarray = xp.stack([largest(*pair) for pair in pairs], axis=1)
    return samples


class NumpyMultiCategorical(TorchFallback):
    """Samples of SB3's ``MultiCategoricalDistribution`` in NumPy. The outputs are the logits."""

    distribution: MultiCategoricalDistribution

    def noise(self, n_steps: int, n_envs: int, n_outputs: int) -> np.ndarray:
        return gumbel(n_steps, n_envs, n_outputs)

    def sampler(self) -> Sampler:
        return partial(largest_of_each, ends=np.cumsum(self.distribution.action_dims)[:-1].tolist())

    def compiled(self) -> tuple[str, tuple[int, ...]]:
        return "categorical", tuple(map(int, self.distribution.action_dims))


class MultiCategoricalOnDevice(MultiCategoricalDistribution):
    """SB3's categorical distributions of several actions, without validation."""

    # Whether an action is `NO_ACTION` where the outputs of the policy are not finite
    marks_actions = True

    def proba_distribution(self: SelfMultiCategorical, action_logits: th.Tensor) -> SelfMultiCategorical:
        split = action_logits.split(list(self.action_dims), dim=1)
        self.distribution = [Categorical(logits=logits, validate_args=False) for logits in split]
        return self

    def log_prob(self, actions: th.Tensor) -> th.Tensor:
        parts = zip(self.distribution, actions.unbind(dim=1), strict=True)
        return th.stack([log_prob_or_nan(part, action) for part, action in parts], dim=1).sum(dim=1)

    def sample(self) -> th.Tensor:
        return th.stack([sample_without_wait(part.probs) for part in self.distribution], dim=1)

    def mode(self) -> th.Tensor:
        return th.stack([marked(part.probs.argmax(dim=1), part.probs) for part in self.distribution], dim=1)
