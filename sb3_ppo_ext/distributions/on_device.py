"""
SB3's distributions for policies on a GPU. The arguments of SB3's are validated by PyTorch, which waits for the GPU three times
for each call of a policy, and ``torch.multinomial`` waits as well. These compute the same bit for bit and draw the same random
numbers, but never wait. Instead of raising an error, they return NaN or :data:`~sb3_ppo_ext.common.guards.NO_ACTION` where the
parameters of a distribution are NaN, which is noticed when the actions arrive on the host.
"""

from copy import copy
from typing import Any, TypeVar

import torch as th
from stable_baselines3.common.distributions import (
    BernoulliDistribution,
    CategoricalDistribution,
    DiagGaussianDistribution,
    Distribution,
    MultiCategoricalDistribution,
    StateDependentNoiseDistribution,
)
from torch.distributions import Bernoulli, Categorical, Normal

from sb3_ppo_ext.common.guards import NO_ACTION
from sb3_ppo_ext.distributions.hybrid import HybridDistribution
from sb3_ppo_ext.distributions.masked import MaskedCategoricalDistribution, MaskedMultiCategoricalDistribution

SelfGaussian = TypeVar("SelfGaussian", bound="GaussianOnDevice")
SelfCategorical = TypeVar("SelfCategorical", bound="CategoricalOnDevice")
SelfMultiCategorical = TypeVar("SelfMultiCategorical", bound="MultiCategoricalOnDevice")
SelfBernoulli = TypeVar("SelfBernoulli", bound="BernoulliOnDevice")
SelfStateDependentNoise = TypeVar("SelfStateDependentNoise", bound="StateDependentNoiseOnDevice")


class GaussianOnDevice(DiagGaussianDistribution):
    """SB3's Gaussian, without validation."""

    def proba_distribution(self: SelfGaussian, mean_actions: th.Tensor, log_std: th.Tensor) -> SelfGaussian:
        std = th.ones_like(mean_actions) * log_std.exp()
        self.distribution = Normal(mean_actions, std, validate_args=False)
        return self


class CategoricalOnDevice(CategoricalDistribution):
    """SB3's categorical distribution, without validation."""

    # Whether an action is `NO_ACTION` where the outputs of the policy are not finite
    marks_actions = True

    def proba_distribution(self: SelfCategorical, action_logits: th.Tensor) -> SelfCategorical:
        self.distribution = Categorical(logits=action_logits, validate_args=False)
        return self

    def log_prob(self, actions: th.Tensor) -> th.Tensor:
        return _log_prob(self.distribution, actions)

    def sample(self) -> th.Tensor:
        return _sample(self.distribution.probs)

    def mode(self) -> th.Tensor:
        return _marked(super().mode(), self.distribution.probs)


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
        return th.stack([_log_prob(part, action) for part, action in parts], dim=1).sum(dim=1)

    def sample(self) -> th.Tensor:
        return th.stack([_sample(part.probs) for part in self.distribution], dim=1)

    def mode(self) -> th.Tensor:
        return th.stack([_marked(part.probs.argmax(dim=1), part.probs) for part in self.distribution], dim=1)


class MaskedCategoricalOnDevice(MaskedCategoricalDistribution, CategoricalOnDevice):
    """The categorical distribution with masks, without validation."""

    validate_args = False


class MaskedMultiCategoricalOnDevice(MaskedMultiCategoricalDistribution, MultiCategoricalOnDevice):
    """The categorical distributions of several actions with masks, without validation."""

    validate_args = False


class BernoulliOnDevice(BernoulliDistribution):
    """SB3's Bernoulli distribution, without validation."""

    def proba_distribution(self: SelfBernoulli, action_logits: th.Tensor) -> SelfBernoulli:
        self.distribution = Bernoulli(logits=action_logits, validate_args=False)
        return self

    def sample(self) -> th.Tensor:
        probs = self.distribution.probs.detach()
        # CUDA cannot be used any more after it was asked for samples with a probability of NaN.
        return th.where(probs.isnan(), probs, th.bernoulli(probs.nan_to_num(0.0)))


class StateDependentNoiseOnDevice(StateDependentNoiseDistribution):
    """SB3's generalized State-Dependent Exploration (gSDE), without validation."""

    def sample_weights(self, log_std: th.Tensor, batch_size: int = 1) -> None:
        std = self.get_std(log_std)
        self.weights_dist = Normal(th.zeros_like(std), std, validate_args=False)
        self.exploration_mat = self.weights_dist.rsample()
        self.exploration_matrices = self.weights_dist.rsample((batch_size,))

    def proba_distribution(
        self: SelfStateDependentNoise, mean_actions: th.Tensor, log_std: th.Tensor, latent_sde: th.Tensor
    ) -> SelfStateDependentNoise:
        self._latent_sde = latent_sde if self.learn_features else latent_sde.detach()
        variance = th.mm(self._latent_sde**2, self.get_std(log_std) ** 2)
        self.distribution = Normal(mean_actions, th.sqrt(variance + self.epsilon), validate_args=False)
        return self


_ON_DEVICE: dict[type, type[Distribution]] = {
    DiagGaussianDistribution: GaussianOnDevice,
    CategoricalDistribution: CategoricalOnDevice,
    MultiCategoricalDistribution: MultiCategoricalOnDevice,
    MaskedCategoricalDistribution: MaskedCategoricalOnDevice,
    MaskedMultiCategoricalDistribution: MaskedMultiCategoricalOnDevice,
    BernoulliDistribution: BernoulliOnDevice,
    StateDependentNoiseDistribution: StateDependentNoiseOnDevice,
}


def on_device(distribution: Any, device: th.device) -> Any:
    """
    :param distribution: Action distribution of a policy that is on a GPU
    :param device: This GPU, on which the noise of gSDE will be as well
    :return: Distribution in the same state that does not wait for the GPU, if it is one of SB3's, or a hybrid one with parts
        of SB3's; others are returned unchanged, and so are subclasses of SB3's, which may compute differently
    """
    if type(distribution) is HybridDistribution:
        hybrid = copy(distribution)
        hybrid.distributions = tuple(on_device(part, device) for part in distribution.distributions)
        return hybrid
    replacement = _ON_DEVICE.get(type(distribution))
    if replacement is None:
        return distribution
    made, state = replacement.__new__(replacement), vars(distribution)
    vars(made).update({name: value.to(device) if isinstance(value, th.Tensor) else value for name, value in state.items()})
    return made


def _sample(probs: th.Tensor) -> th.Tensor:
    """What ``torch.multinomial`` draws, with the same random numbers, but without its checks, which wait for the GPU."""
    probs = probs.detach()
    return _marked((probs / th.empty_like(probs).exponential_()).argmax(dim=-1), probs)


def _marked(actions: th.Tensor, probs: th.Tensor) -> th.Tensor:
    # A logit of NaN or infinity makes all probabilities NaN.
    return actions.masked_fill(probs[..., 0].isnan(), NO_ACTION)


def _log_prob(distribution: Categorical, actions: th.Tensor) -> th.Tensor:
    # CUDA cannot be used any more after an index that is out of range. The logarithm is NaN then.
    return distribution.log_prob(actions.clamp(min=0))
