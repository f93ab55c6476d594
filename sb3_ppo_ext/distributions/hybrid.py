"""Distribution over the actions of a ``Dict`` or ``Tuple`` space: independent distributions of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch as th
from stable_baselines3.common.distributions import (
    BernoulliDistribution,
    CategoricalDistribution,
    Distribution,
    MultiCategoricalDistribution,
)
from torch import nn

from sb3_ppo_ext.common.guards import NO_ACTION
from sb3_ppo_ext.common.type_aliases import Arrays
from sb3_ppo_ext.distributions.base import NumpyDistribution, Sampler
from sb3_ppo_ext.distributions.categorical import NumpyCategorical
from sb3_ppo_ext.distributions.head import Head, Noise

SelfHybrid = TypeVar("SelfHybrid", bound="HybridDistribution")


class Part(NamedTuple):
    """
    A part of a :class:`HybridDistribution`.

    :param family: Its row in the registry
    :param n_actions: Number of its columns in a sample
    :param n_outputs: Number of outputs of the output layer that parametrise it
    """

    family: Any
    n_actions: int
    n_outputs: int


class HybridDistribution(Distribution):
    """
    Independent distributions of the parts of a ``Dict`` or ``Tuple`` action space. All dimensions of one kind are one
    distribution: that of all ``Box`` parts comes first, then that of all ``Discrete`` and ``MultiDiscrete`` parts
    (``MultiCategoricalDistribution``), and last that of all ``MultiBinary`` parts (``BernoulliDistribution``). There is none
    for a kind that the space has not.

    Samples are vectors, see :class:`~sb3_ppo_ext.common.hybrid_actions.FlatActionSpace`: those of a bounded distribution are
    latents, integers are floats. Log probabilities, entropies and KL divergences are sums over the parts.

    :param parts: Description and distribution of each part
    """

    def __init__(self, parts: Sequence[tuple[Part, Distribution]]):
        super().__init__()
        self.parts = tuple(part for part, _ in parts)
        self.distributions = tuple(distribution for _, distribution in parts)
        self.n_actions = [part.n_actions for part in self.parts]
        self.n_outputs = [part.n_outputs for part in self.parts]
        self.action_dim = sum(self.n_actions)

    @property
    def continuous(self) -> Distribution | None:
        """Distribution of the ``Box`` parts, ``None`` if there are none."""
        return self.distributions[0] if self._has_boxes else None

    @property
    def _has_boxes(self) -> bool:
        return not isinstance(self.distributions[0], MultiCategoricalDistribution | BernoulliDistribution)

    @property
    def n_stds(self) -> int:
        """Number of standard deviations that do not depend on observations."""
        return self.n_actions[0] if self.parts[0].family.has_log_std else 0

    def init_bias(self, layer: nn.Linear) -> None:
        """
        Give the biases of an output layer the initial values that the family of a part demands.

        :param layer: Output layer
        """
        for part, bias in zip(self.parts, layer.bias.detach().split(self.n_outputs), strict=True):
            if part.family.initial_bias is not None:
                bias.fill_(part.family.initial_bias)

    def proba_distribution_net(self, latent_dim: int, log_std_init: float = 0.0) -> nn.Linear | tuple[nn.Linear, nn.Parameter]:
        """
        :param latent_dim: Size of the last layer of the policy network (before the output layer)
        :param log_std_init: Initial value of the logarithms of the standard deviations
        :return: Output layer, which computes the inputs of all parts, and parameter with the logarithms of the standard
            deviations, shape ``(n_stds,)``, if there are any
        """
        layer = nn.Linear(latent_dim, sum(self.n_outputs))
        self.init_bias(layer)
        return (layer, nn.Parameter(th.ones(self.n_stds) * log_std_init)) if self.n_stds else layer

    def proba_distribution(self: SelfHybrid, outputs: th.Tensor, log_std: th.Tensor | None = None) -> SelfHybrid:
        """
        :param outputs: Outputs of the output layer, part after part, shape ``(batch_size, sum(n_outputs))``
        :param log_std: Logarithms of the standard deviations, ``None`` if there are none
        :return: The distribution itself
        """
        own = () if log_std is None else (log_std,)
        made: list[Distribution] = []
        for distribution, each in zip(self.distributions, outputs.split(self.n_outputs, dim=1), strict=True):
            # Copied, so that a shallow copy of this object keeps its parts.
            made.append(copy(distribution).proba_distribution(each, *(() if made else own)))
        self.distributions = tuple(made)
        return self

    def log_prob(self, actions: th.Tensor) -> th.Tensor:
        """
        :param actions: Samples, shape ``(batch_size, action_dim)``
        :return: Log probabilities of the actions, shape ``(batch_size,)``
        """
        pairs = zip(self.distributions, actions.split(self.n_actions, dim=1), strict=True)
        return reduce(add, [each.log_prob(_as_stored_by(each, columns)) for each, columns in pairs])

    def entropy(self) -> th.Tensor:
        """
        :return: Entropies in nats, shape ``(batch_size,)``
        """
        entropies: list[Any] = [each.entropy() for each in self.distributions]
        return reduce(add, entropies)

    def get_actions(self, deterministic: bool = False) -> th.Tensor:
        """
        :param deterministic: Whether to return the deterministic action of each part instead of a sample
        :return: Samples, shape ``(batch_size, action_dim)``
        """
        return th.cat([_as_floats(each, each.get_actions(deterministic)) for each in self.distributions], dim=1)

    def sample(self) -> th.Tensor:
        return self.get_actions()

    def mode(self) -> th.Tensor:
        return self.get_actions(deterministic=True)

    def actions_from_params(self, *args: Any, deterministic: bool = False) -> th.Tensor:
        return self.proba_distribution(*args).get_actions(deterministic)

    def log_prob_from_params(self, *args: object) -> tuple[th.Tensor, th.Tensor]:
        actions = self.actions_from_params(*args)
        return actions, self.log_prob(actions)


def _as_stored_by(distribution: Distribution, columns: th.Tensor) -> th.Tensor:
    """Columns of samples as the distribution of a part evaluates them."""
    return columns.long() if isinstance(distribution, MultiCategoricalDistribution) else columns


def _as_floats(distribution: Distribution, actions: th.Tensor) -> th.Tensor:
    if actions.is_floating_point():
        return actions
    floats = actions.float()
    # Among floats, NaN says that the outputs of the policy are not finite.
    return floats.masked_fill(actions == NO_ACTION, th.nan) if hasattr(distribution, "marks_actions") else floats


def parameters(distribution: HybridDistribution) -> th.Tensor:
    """
    :param distribution: Hybrid distribution
    :return: Parameters of its parts, one after the other, shape ``(batch_size, n)``
    """
    return th.cat(_parameters_of_parts(distribution), dim=1)


def _parameters_of_parts(distribution: HybridDistribution) -> list[th.Tensor]:
    pairs = zip(distribution.parts, distribution.distributions, strict=True)
    return [part.family.parameters(each) for part, each in pairs]


def kl_divergence(old: th.Tensor, new: HybridDistribution) -> th.Tensor:
    """
    :param old: :func:`parameters` of a hybrid distribution with the same parts, shape ``(batch_size, n)``
    :param new: Hybrid distribution for the same observations
    :return: KL(old || new) in nats, shape ``(batch_size,)``
    """
    of_new = _parameters_of_parts(new)
    splits = old.split([each.shape[1] for each in of_new], dim=1)
    parts = zip(new.parts, splits, of_new, new.distributions, strict=True)
    # Concatenated with those of a Beta distribution, all parameters are in float64.
    return reduce(add, [part.family.kl_divergence(split.to(own.dtype), each) for part, split, own, each in parts])


def location(distribution: HybridDistribution) -> th.Tensor:
    """
    :param distribution: Hybrid distribution
    :return: Deterministic actions of all parts as numbers with a gradient, one part after the other, shape ``(batch_size, n)``
    """
    pairs = zip(distribution.parts, distribution.distributions, strict=True)
    return th.cat([part.family.location(each) for part, each in pairs], dim=1)


def unsquashed_mean(distribution: HybridDistribution) -> th.Tensor:
    """
    :param distribution: Hybrid distribution
    :return: Mean of the ``Box`` parts before any squashing, shape ``(batch_size, n)``
    :raises ValueError: if there is no mean that could leave the bounds of the action space
    """
    mean: Callable[[Any], th.Tensor] | None = distribution.parts[0].family.unsquashed_mean
    if mean is None:
        raise ValueError("no part of the distribution has a mean that could leave the bounds of the action space")
    return mean(distribution.continuous)


class NumpyHybrid(NumpyDistribution):
    """NumPy implementation of :class:`HybridDistribution`: those of its parts, and of each categorical dimension."""

    distribution: HybridDistribution

    def __init__(self, distribution: HybridDistribution, log_std: nn.Parameter | None):
        super().__init__(distribution, log_std)
        made = list(_numpy_parts(distribution, log_std))
        self.parts = [part for part, _, _ in made]
        self.actions, self.outputs = _slices(n for _, n, _ in made), _slices(n for _, _, n in made)
        self.descriptions = _slices(n + (0 if part.log_std is None else len(part.log_std)) for part, _, n in made)

    def pack(self) -> None:
        for part in self.parts:
            part.pack()

    def has_spread(self) -> bool:
        return all(part.has_spread() for part in self.parts)

    def noise(self, n_steps: int, n_envs: int, n_outputs: int) -> _NoiseOfParts:
        pairs = zip(self.parts, self.outputs, strict=True)
        return _NoiseOfParts([part.noise(n_steps, n_envs, own.stop - own.start) for part, own in pairs])

    def with_normal(self, noise: Arrays, normal: np.ndarray) -> _NoiseOfParts:
        first, *others = noise.parts
        return _NoiseOfParts([self.parts[0].with_normal(first, normal), *others])

    def scaled(self, noise: Arrays) -> Arrays:
        return _NoiseOfParts([part.scaled(each) for part, each in zip(self.parts, noise.parts, strict=True)])

    def sampler(self) -> Sampler | None:
        samplers = [sampler for part in self.parts if (sampler := part.sampler()) is not None]
        return partial(sample_parts, samplers=samplers, columns=self.outputs) if len(samplers) == len(self.parts) else None

    def log_prob(self, outputs: np.ndarray, actions: np.ndarray) -> np.ndarray:
        parts = zip(self.parts, self.outputs, self.actions, strict=True)
        log_probs: np.ndarray = reduce(add, [part.log_prob(outputs[:, own], actions[:, taken]) for part, own, taken in parts])
        return log_probs

    def described(self, outputs: np.ndarray) -> np.ndarray:
        pairs = zip(self.parts, self.outputs, strict=True)
        return np.concatenate([part.described(outputs[:, own]) for part, own in pairs], axis=1)

    def entropies(self, described: np.ndarray) -> np.ndarray:
        pairs = zip(self.parts, self.descriptions, strict=True)
        entropies = reduce(add, [part.entropies(described[:, own]) for part, own in pairs])
        return entropies

    def parameters(self, described: np.ndarray) -> th.Tensor | None:
        # The first part is that of the `Box` parts, and no other one is bounded.
        return self.parts[0].parameters(described[:, self.descriptions[0]])

    def _gradients(self, d_log_prob: np.ndarray, ent_coef: float) -> tuple[np.ndarray, np.ndarray | None]:
        d_outputs, d_log_stds = zip(*(part._gradients(d_log_prob, ent_coef) for part in self.parts), strict=True)
        return np.concatenate(d_outputs, axis=1), d_log_stds[0]


class _NoiseOfParts:
    """Random numbers of all steps of a rollout, or of one of them."""

    def __init__(self, parts: list[Any]):
        self.parts = parts

    def __getitem__(self, key: object) -> _NoiseOfParts:
        return _NoiseOfParts([part[key] for part in self.parts])


def sample_parts(
    outputs: np.ndarray, noise: _NoiseOfParts, samplers: Sequence[Sampler], columns: Sequence[slice]
) -> np.ndarray:
    """
    :param outputs: Outputs of the output layer, part after part, shape ``(n, n_outputs)``
    :param noise: Noise of the parts
    :param samplers: Sampler of each part
    :param columns: Columns of the outputs of each part
    :return: Samples, shape ``(n, action_dim)``
    """
    parts = zip(samplers, columns, noise.parts, strict=True)
    samples = [sampler(outputs[:, own], each) for sampler, own, each in parts]
    return np.concatenate([each.reshape(len(outputs), -1).astype(np.float32) for each in samples], axis=1)


def _numpy_parts(
    distribution: HybridDistribution, log_std: nn.Parameter | None
) -> Iterator[tuple[NumpyDistribution, int, int]]:
    """NumPy implementations of the parts, with the numbers of columns of their samples and of their outputs."""
    for part, each in zip(distribution.parts, distribution.distributions, strict=True):
        if isinstance(each, MultiCategoricalDistribution):
            for n in each.action_dims:
                yield NumpyCategorical(CategoricalDistribution(n), None), 1, n
        else:
            own = log_std if part.family.has_log_std else None
            yield part.family.numpy_class(each, own), part.n_actions, part.n_outputs


def _slices(sizes: Iterator[int]) -> list[slice]:
    """Successive slices of these sizes."""
    slices: list[slice] = []
    for size in sizes:
        start = slices[-1].stop if slices else 0
        slices.append(slice(start, start + size))
    return slices


class HybridHead(Head):
    """Independent parts."""

    def __init__(self, distribution: HybridDistribution, log_std: th.Tensor | None = None, n_latents: int = 0):
        super().__init__(distribution)
        pairs = list(zip(distribution.parts, distribution.distributions, strict=True))
        self.heads = nn.ModuleList(
            part.family.head(each, log_std if part.family.has_log_std else None, n_latents) for part, each in pairs
        )
        self.n_outputs = [part.n_outputs for part, _ in pairs]

    def noise(self) -> list[Noise]:
        ports: list[Noise] = []
        for number, head in enumerate(self._heads()):
            for port in head.noise():
                ports.append(Noise(f"{port.name}_{number}", port.kind, port.shape))
        return ports

    def deterministic(self, outputs: th.Tensor) -> th.Tensor:
        pairs = zip(self._heads(), outputs.split(self.n_outputs, dim=1), strict=True)
        return self._joined([head.deterministic(own) for head, own in pairs])

    def sample(self, outputs: th.Tensor, latents: th.Tensor, noise: list[th.Tensor]) -> th.Tensor:
        rest, samples = list(noise), []
        for head, own in zip(self._heads(), outputs.split(self.n_outputs, dim=1), strict=True):
            n = len(head.noise())
            samples.append(head.sample(own, latents, rest[:n]))
            rest = rest[n:]
        return self._joined(samples)

    def _heads(self) -> list[Head]:
        return list(self.heads)  # type: ignore[arg-type]

    @staticmethod
    def _joined(samples: list[th.Tensor]) -> th.Tensor:
        return th.cat([each.reshape(each.shape[0], -1).float() for each in samples], dim=1)
