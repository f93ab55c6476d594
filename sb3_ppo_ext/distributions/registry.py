"""
Registry of all action distributions, one row each. To add one, write its file and add its row to :data:`FAMILIES`; to make it
a value of the option ``action_dist``, add its name to :data:`ActionDist`.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch as th
from stable_baselines3.common.distributions import (
    BernoulliDistribution,
    CategoricalDistribution,
    DiagGaussianDistribution,
    Distribution,
    MultiCategoricalDistribution,
    StateDependentNoiseDistribution,
)
from torch import nn

from sb3_ppo_ext.common.hybrid_actions import FlatActionSpace
from sb3_ppo_ext.distributions import (
    bernoulli,
    beta,
    categorical,
    gaussian,
    hybrid,
    masked,
    multi_categorical,
    squashed_gaussian,
    state_dependent_noise,
)
from sb3_ppo_ext.distributions.base import BoundedDistribution, DeterministicAction, NumpyDistribution
from sb3_ppo_ext.distributions.head import Head
from sb3_ppo_ext.distributions.hybrid import HybridDistribution, Part
from sb3_ppo_ext.distributions.torch_fallback import TorchFallback

# Values of the option `action_dist`, for actions in a `Box`
ActionDist = Literal["gaussian", "squashed_gaussian", "beta"]
# SB3's distribution for actions in a `Box`
DEFAULT: ActionDist = "gaussian"
# Standard deviations from 2e-9 to 5e8
LOG_STD_INIT_RANGE = (-20.0, 20.0)


@dataclass(frozen=True)
class DistributionFamily:
    """
    A family of action distributions, with everything that losses, engines and policies need to know about it.

    The distributions that ``action_dist`` can name, other than SB3's Gaussian, are constructed by
    ``torch_class(action_dim, deterministic_action)``.

    :param name: Name of the family
    :param torch_class: PyTorch implementation, SB3's class or ours; subclasses belong to the same family unless they have a
        row of their own
    :param head: Samples as a function of the outputs of the output layer and of random numbers, for exported policies
    :param location: Function that returns the deterministic action as numbers with a gradient, shape ``(batch_size, n)``: the
        mean of actions in a ``Box``, in units of the bounds if it cannot leave them, and probabilities of discrete choices
    :param parameters: Function that returns the parameters that define a distribution, shape ``(batch_size, n)``; ``None`` if
        its KL divergence has no closed form
    :param kl_divergence: Function that takes the parameters of the old distribution and the new distribution, and returns
        KL(old || new), shape ``(batch_size,)``; ``None`` if it has no closed form
    :param numpy_class: NumPy implementation for the native engine; the default calls PyTorch
    :param on_device: The same as ``torch_class`` without anything that waits for a GPU, for SB3's classes, whose arguments
        PyTorch validates; ``None`` if it does not wait
    :param unsquashed_mean: Function that returns the mean before any squashing, shape ``(batch_size, action_dim)``; ``None``
        if the mean cannot leave the bounds of the action space, or there is no mean
    :param has_log_std: Whether ``proba_distribution`` takes means and the policy's parameter ``log_std``, as SB3's Gaussian
        does. If not, it takes the outputs of the layer that ``proba_distribution_net`` returns
    :param log_std_range: Allowed values of ``log_std_init``
    :param deterministic_actions: Allowed values of ``deterministic_action``
    :param outputs_per_dimension: Number of outputs of the output layer for each dimension of a ``Box``
    :param initial_bias: Initial biases of the output layer, ``None`` for those that SB3 gives it
    """

    name: str
    torch_class: type[Distribution]
    head: type[Head]
    location: Callable[[Any], th.Tensor]
    parameters: Callable[[Any], th.Tensor] | None = None
    kl_divergence: Callable[[th.Tensor, Any], th.Tensor] | None = None
    numpy_class: type[NumpyDistribution] = TorchFallback
    on_device: type[Distribution] | None = None
    unsquashed_mean: Callable[[Any], th.Tensor] | None = None
    has_log_std: bool = False
    log_std_range: tuple[float, float] = LOG_STD_INIT_RANGE
    deterministic_actions: tuple[DeterministicAction, ...] = ("mean",)
    outputs_per_dimension: int = 1
    initial_bias: float | None = None

    @property
    def is_bounded(self) -> bool:
        """Whether samples are latents, which :meth:`BoundedDistribution.position` turns into actions within the bounds."""
        return issubclass(self.torch_class, BoundedDistribution)


FAMILIES = (
    DistributionFamily(
        "gaussian",
        DiagGaussianDistribution,
        gaussian.GaussianHead,
        gaussian.unsquashed_mean,
        gaussian.parameters,
        gaussian.kl_divergence,
        gaussian.NumpyGaussian,
        gaussian.GaussianOnDevice,
        gaussian.unsquashed_mean,
        has_log_std=True,
        deterministic_actions=("mean", "mode"),  # Mean and mode are the same.
    ),
    DistributionFamily(
        "state_dependent_noise",
        StateDependentNoiseDistribution,
        state_dependent_noise.StateDependentNoiseHead,
        state_dependent_noise.location,
        state_dependent_noise.parameters,
        state_dependent_noise.kl_divergence,
        state_dependent_noise.NumpyStateDependentNoise,
        state_dependent_noise.StateDependentNoiseOnDevice,
        state_dependent_noise.unsquashed_mean,
        has_log_std=True,
    ),
    DistributionFamily(
        "squashed_gaussian",
        squashed_gaussian.TanhGaussianDistribution,
        squashed_gaussian.SquashedGaussianHead,
        squashed_gaussian.location,
        squashed_gaussian.parameters,
        squashed_gaussian.kl_divergence,
        squashed_gaussian.NumpySquashedGaussian,
        unsquashed_mean=squashed_gaussian.unsquashed_mean,
        has_log_std=True,
        log_std_range=squashed_gaussian.LOG_STD_RANGE,
    ),
    DistributionFamily(
        "beta",
        beta.BoundedBetaDistribution,
        beta.BetaHead,
        beta.location,
        beta.BoundedBetaDistribution.parameters,
        beta.kl_divergence,
        beta.NumpyBeta,
        deterministic_actions=beta.DETERMINISTIC_ACTIONS,
        outputs_per_dimension=2,
        initial_bias=beta.BETA_BIAS,
    ),
    DistributionFamily(
        "categorical",
        CategoricalDistribution,
        categorical.CategoricalHead,
        categorical.location,
        categorical.parameters,
        categorical.kl_divergence,
        categorical.NumpyCategorical,
        categorical.CategoricalOnDevice,
    ),
    DistributionFamily(
        "multi_categorical",
        MultiCategoricalDistribution,
        categorical.CategoricalHead,
        multi_categorical.location,
        multi_categorical.parameters,
        multi_categorical.kl_divergence,
        multi_categorical.NumpyMultiCategorical,
        multi_categorical.MultiCategoricalOnDevice,
    ),
    DistributionFamily(
        "masked_categorical",
        masked.MaskedCategoricalDistribution,
        categorical.CategoricalHead,
        categorical.location,
        categorical.parameters,
        categorical.kl_divergence,
        masked.NumpyMaskedCategorical,
        masked.MaskedCategoricalOnDevice,
    ),
    DistributionFamily(
        "masked_multi_categorical",
        masked.MaskedMultiCategoricalDistribution,
        categorical.CategoricalHead,
        multi_categorical.location,
        multi_categorical.parameters,
        multi_categorical.kl_divergence,
        multi_categorical.NumpyMultiCategorical,
        masked.MaskedMultiCategoricalOnDevice,
    ),
    DistributionFamily(
        "bernoulli",
        BernoulliDistribution,
        bernoulli.BernoulliHead,
        bernoulli.location,
        bernoulli.parameters,
        bernoulli.kl_divergence,
        bernoulli.NumpyBernoulli,
        bernoulli.BernoulliOnDevice,
    ),
    DistributionFamily(
        "hybrid",
        HybridDistribution,
        hybrid.HybridHead,
        hybrid.location,
        hybrid.parameters,
        hybrid.kl_divergence,
        hybrid.NumpyHybrid,
        unsquashed_mean=hybrid.unsquashed_mean,
    ),
)
_BY_NAME = {family.name: family for family in FAMILIES}
_BY_CLASS: dict[type, DistributionFamily] = {family.torch_class: family for family in FAMILIES}
# Families that `action_dist` can name
ACTION_DISTS = {name: _BY_NAME[name] for name in get_args(ActionDist)}


def hybrid_distribution(
    space: FlatActionSpace, action_dist: ActionDist, deterministic_action: DeterministicAction
) -> HybridDistribution:
    """
    :param space: Vectors for the actions of a ``Dict`` or ``Tuple`` space
    :param action_dist: Distribution of its ``Box`` parts
    :param deterministic_action: Deterministic action of these, if the distribution supports several
    :return: Distribution of all parts
    """
    parts: list[tuple[Part, Distribution]] = []
    if n := space.n_continuous:
        family = ACTION_DISTS[action_dist]
        make: Any = family.torch_class
        own = () if action_dist == DEFAULT else (deterministic_action,)
        parts.append((Part(family, n, n * family.outputs_per_dimension), make(n, *own)))
    if values := space.n_values:
        categorical = MultiCategoricalDistribution(values)
        parts.append((Part(_BY_NAME["multi_categorical"], len(values), sum(values)), categorical))
    if n := space.n_binary:
        parts.append((Part(_BY_NAME["bernoulli"], n, n), BernoulliDistribution(n)))
    return HybridDistribution(parts)


def family_of(distribution: object) -> DistributionFamily | None:
    """
    :param distribution: A distribution
    :return: Family of its class, or else of the nearest base class; ``None`` if none of them has a row
    """
    for parent in type(distribution).__mro__:
        if parent in _BY_CLASS:
            return _BY_CLASS[parent]
    return None


def parameters(distribution: Distribution) -> th.Tensor | None:
    """
    :param distribution: Distribution for a batch of observations
    :return: Parameters that define it, shape ``(batch_size, n)``: logits, means and standard deviations, or alpha and beta;
        ``None`` if its KL divergence has no closed form, or its family has no row here
    """
    family = family_of(distribution)
    return None if family is None or family.parameters is None else family.parameters(distribution)


def kl_divergence(old: th.Tensor, new: Distribution) -> th.Tensor:
    """
    KL(old || new), exact and differentiable in the new distribution.

    :param old: :func:`parameters` of the old distribution, of the same family, shape ``(batch_size, n)``
    :param new: New distribution, for the same observations
    :return: KL divergences in nats, shape ``(batch_size,)``
    :raises ValueError: if there is no closed form, or the family has no row
    """
    family = family_of(new)
    if family is None or family.kl_divergence is None:
        raise ValueError(f"{type(new).__name__} has no known KL divergence in closed form")
    return family.kl_divergence(old, new)


def unsquashed_mean(distribution: object) -> th.Tensor:
    """
    :param distribution: Gaussian, squashed or not
    :return: Mean before any squashing, shape ``(batch_size, action_dim)``
    :raises ValueError: if it has no mean that could leave the bounds of the action space
    """
    family = family_of(distribution)
    if family is None or family.unsquashed_mean is None:
        raise ValueError(f"{type(distribution).__name__} has no mean that could leave the bounds of the action space")
    return family.unsquashed_mean(distribution)


def location(distribution: Distribution) -> th.Tensor:
    """
    :param distribution: Distribution for a batch of observations
    :return: Its deterministic action as numbers with a gradient, shape ``(batch_size, n)``: the mean of actions in a ``Box``,
        in units of the bounds if it cannot leave them; probabilities of all choices of discrete actions
    :raises ValueError: if its family has no row
    """
    family = family_of(distribution)
    if family is None:
        raise ValueError(f"{type(distribution).__name__} has no known deterministic action with a gradient")
    return family.location(distribution)


def numpy_distribution(
    distribution: Distribution, log_std: nn.Parameter | None, transform: nn.Module | None = None
) -> NumpyDistribution:
    """
    :param distribution: Action distribution of the policy (``policy.action_dist``)
    :param log_std: Parameter ``log_std`` of the policy, ``None`` if it has none
    :param transform: Module that the policy applies to the outputs of its output layer, ``None`` if there is none
    :return: NumPy implementation for exactly this class, because subclasses may compute differently; otherwise one that calls
        PyTorch
    """
    family = _BY_CLASS.get(type(distribution))
    if isinstance(distribution, masked.MaskedDistribution):
        distribution = distribution.unmasked()  # The outputs are masked.
    if family is None or transform is not None:
        return TorchFallback(distribution, log_std, transform)
    return family.numpy_class(distribution, log_std)


def why_not_numpy(distribution: Distribution) -> str | None:
    """
    :param distribution: Action distribution of the policy
    :return: Reason why :func:`numpy_distribution` does not support it, ``None`` if it does
    """
    family = family_of(distribution)
    if isinstance(distribution, masked.MaskedDistribution) and type(distribution) not in _BY_CLASS:
        return "the action distribution masks actions in its own way"
    if getattr(type(distribution), "entropy", None) not in {getattr(known, "entropy", None) for known in _BY_CLASS}:
        return f"the entropy of {type(distribution).__name__} may have no closed form, which this backend needs"
    return None if family is None else family.numpy_class.why_not(distribution)


def on_device(distribution: Distribution, device: th.device) -> Distribution:
    """
    SB3's distributions let PyTorch validate their arguments, which waits for the GPU three times for each call of a policy,
    and ``torch.multinomial`` waits as well. Those of :attr:`DistributionFamily.on_device` compute the same bit for bit and
    draw the same random numbers, but never wait. Instead of raising an error, they return NaN or
    :data:`~sb3_ppo_ext.common.guards.NO_ACTION` where the parameters of a distribution are NaN, which is noticed when the
    actions arrive on the host.

    :param distribution: Action distribution of a policy that is on a GPU
    :param device: This GPU, on which the noise of gSDE will be as well
    :return: Distribution in the same state that does not wait for the GPU, if it is one of SB3's, or a hybrid one with parts
        of SB3's; others are returned unchanged, and so are subclasses of SB3's, which may compute differently
    """
    if type(distribution) is HybridDistribution:
        made: Any = copy(distribution)
        made.distributions = tuple(on_device(part, device) for part in distribution.distributions)
        return made
    family = _BY_CLASS.get(type(distribution))
    if family is None or family.on_device is None:
        return distribution
    made, state = family.on_device.__new__(family.on_device), vars(distribution)
    vars(made).update({name: value.to(device) if isinstance(value, th.Tensor) else value for name, value in state.items()})
    return made
