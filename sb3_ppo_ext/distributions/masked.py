"""
Action distributions with masks of invalid actions, for ``Discrete``, ``MultiDiscrete`` and ``MultiBinary`` spaces. They
compute what those of sb3-contrib's MaskablePPO do, bit for bit.

Paper: https://arxiv.org/abs/2006.14171
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar

import torch as th
from gymnasium import spaces
from stable_baselines3.common.distributions import CategoricalDistribution, Distribution, MultiCategoricalDistribution
from torch.distributions import Categorical
from torch.nn import functional as F

from sb3_ppo_ext.common.action_masks import choices_of
from sb3_ppo_ext.distributions.categorical import CategoricalOnDevice, NumpyCategorical
from sb3_ppo_ext.distributions.multi_categorical import MultiCategoricalOnDevice

# Logit of an invalid action, whose probability is then 0
INVALID = -1e8

SelfMaskedCategorical = TypeVar("SelfMaskedCategorical", bound="MaskedCategoricalDistribution")
SelfMaskedMultiCategorical = TypeVar("SelfMaskedMultiCategorical", bound="MaskedMultiCategoricalDistribution")


class MaskedDistribution(Distribution):
    """An action distribution in which invalid actions have the probability 0."""

    # Whether each action is valid, for the next call of `proba_distribution`, shape (batch_size, n_choices)
    masks: th.Tensor | None = None
    # As of `torch.distributions`: `None` for its default
    validate_args: bool | None = None

    @abstractmethod
    def unmasked(self) -> Distribution:
        """:return: Distribution of SB3 that computes the same from logits that are masked already"""

    def _take_masks(self) -> th.Tensor:
        masks, self.masks = self.masks, None
        if masks is None:
            raise RuntimeError("The masks of a `MaskedDistribution` must be set before each call of `proba_distribution`.")
        return masks

    def _masked(self, distribution: Categorical, masks: th.Tensor) -> Categorical:
        # These logits are normalised, as MaskablePPO's are when it masks them.
        logits = th.where(masks, distribution.logits, th.full_like(distribution.logits, INVALID))
        return Categorical(logits=logits, validate_args=self.validate_args)

    @staticmethod
    def _entropy(distribution: Categorical, masks: th.Tensor) -> th.Tensor:
        terms = distribution.logits * distribution.probs
        return -th.where(masks, terms, th.zeros_like(terms)).sum(-1)


class MaskedCategoricalDistribution(MaskedDistribution, CategoricalDistribution):
    """SB3's categorical distribution, with masks."""

    def proba_distribution(self: SelfMaskedCategorical, action_logits: th.Tensor) -> SelfMaskedCategorical:
        self.valid = self._take_masks()
        super().proba_distribution(action_logits)
        self.distribution = self._masked(self.distribution, self.valid)
        return self

    def entropy(self) -> th.Tensor:
        return self._entropy(self.distribution, self.valid)

    def unmasked(self) -> CategoricalDistribution:
        return CategoricalDistribution(self.action_dim)


class MaskedMultiCategoricalDistribution(MaskedDistribution, MultiCategoricalDistribution):
    """SB3's categorical distributions of several actions, with masks."""

    def proba_distribution(self: SelfMaskedMultiCategorical, action_logits: th.Tensor) -> SelfMaskedMultiCategorical:
        self.valid = self._take_masks().split([int(n) for n in self.action_dims], dim=1)
        super().proba_distribution(action_logits)
        self.distribution = [self._masked(*pair) for pair in zip(self.distribution, self.valid, strict=True)]
        return self

    def entropy(self) -> th.Tensor:
        return th.stack([self._entropy(*pair) for pair in zip(self.distribution, self.valid, strict=True)], dim=1).sum(dim=1)

    def unmasked(self) -> MultiCategoricalDistribution:
        return MultiCategoricalDistribution(self.action_dims)


def make_masked_distribution(action_space: spaces.Space) -> MaskedDistribution:
    """
    :param action_space: ``Discrete``, ``MultiDiscrete`` or ``MultiBinary`` space
    :return: Its action distribution with masks
    """
    choices = choices_of(action_space)
    if isinstance(action_space, spaces.Discrete):
        return MaskedCategoricalDistribution(*choices)
    return MaskedMultiCategoricalDistribution(choices)


class NumpyMaskedCategorical(NumpyCategorical):
    """NumPy implementation of the categorical distribution with masks. The outputs are logits that are masked already."""

    known = MaskedCategoricalDistribution


class MaskedCategoricalOnDevice(MaskedCategoricalDistribution, CategoricalOnDevice):
    """The categorical distribution with masks, without validation."""

    validate_args = False


class MaskedMultiCategoricalOnDevice(MaskedMultiCategoricalDistribution, MultiCategoricalOnDevice):
    """The categorical distributions of several actions with masks, without validation."""

    validate_args = False


def masked_outputs(distribution: object, outputs: th.Tensor, masks: th.Tensor) -> th.Tensor:
    """
    :param distribution: Action distribution with masks
    :param outputs: Outputs of the output layer, shape ``(batch_size, n_choices)``
    :param masks: Whether each choice is valid, the same shape
    :return: Logits, those of invalid choices too low to be chosen
    """
    assert isinstance(distribution, MaskedDistribution)
    n_choices = [int(n) for n in getattr(distribution, "action_dims", [outputs.shape[1]])]
    # Normalised, as the distribution does it: then no valid logit is as low as an invalid one.
    logits = th.cat([F.log_softmax(each, dim=1) for each in outputs.split(n_choices, dim=1)], dim=1)
    return th.where(masks, logits, th.full_like(logits, INVALID))
