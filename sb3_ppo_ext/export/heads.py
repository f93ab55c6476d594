"""
From the outputs of a policy's output layer to samples, as functions of the outputs and of given random numbers, so that they
can be part of a graph. One class for each family of action distributions.
"""

from __future__ import annotations

import copy
from typing import Any

import torch as th
from torch import nn
from torch.nn import functional as F

from sb3_ppo_ext.common.validation import refuse
from sb3_ppo_ext.distributions import family_of
from sb3_ppo_ext.distributions.base import EDGE
from sb3_ppo_ext.distributions.masked import INVALID, MaskedDistribution
from sb3_ppo_ext.distributions.squashed_gaussian import LOG_STD_RANGE
from sb3_ppo_ext.export.ports import Port

# Rounds of rejection sampling: one of them accepts with a probability of at least 0.95.
ROUNDS = 8


class Head(nn.Module):
    """
    Samples of an action distribution.

    :param distribution: Action distribution of the policy
    :param log_std: Parameter ``log_std`` of the policy, ``None`` if it has none
    :param n_latents: Number of inputs of the output layer
    """

    log_std: th.Tensor

    def __init__(self, distribution: Any, log_std: Any = None, n_latents: int = 0):
        super().__init__()
        # A copy: what is computed here must not stay in the policy.
        self.distribution = copy.copy(distribution)
        self.n_latents = n_latents
        if log_std is not None:
            self.register_buffer("log_std", log_std.detach().clone())

    def noise(self) -> list[Port]:
        """:return: Inputs for the random numbers of one sample"""
        raise NotImplementedError

    def deterministic(self, outputs: th.Tensor) -> th.Tensor:
        """
        :param outputs: Outputs of the output layer, shape ``(batch_size, n_outputs)``
        :return: Deterministic samples, as the rollout buffer stores samples, shape ``(batch_size, n_actions)``
        """
        raise NotImplementedError

    def sample(self, outputs: th.Tensor, latents: th.Tensor, noise: list[th.Tensor]) -> th.Tensor:
        """
        :param outputs: Outputs of the output layer, shape ``(batch_size, n_outputs)``
        :param latents: Inputs of the output layer, shape ``(batch_size, n_latents)``
        :param noise: Random numbers for :meth:`noise`
        :return: Samples, shape ``(batch_size, n_actions)``
        """
        raise NotImplementedError


class GaussianHead(Head):
    """Gaussian with a standard deviation that does not depend on the observation."""

    def noise(self) -> list[Port]:
        return [Port("noise", "normal_noise", (len(self.log_std),))]

    def deterministic(self, outputs: th.Tensor) -> th.Tensor:
        return outputs

    def sample(self, outputs: th.Tensor, latents: th.Tensor, noise: list[th.Tensor]) -> th.Tensor:
        return outputs + self.log_std.exp() * noise[0]


class SquashedGaussianHead(GaussianHead):
    """Gaussian before the tanh, with a clamped standard deviation."""

    def sample(self, outputs: th.Tensor, latents: th.Tensor, noise: list[th.Tensor]) -> th.Tensor:
        return outputs + self.log_std.clamp(*LOG_STD_RANGE).exp() * noise[0]


class StateDependentNoiseHead(Head):
    """gSDE: the noise is a matrix, multiplied with the inputs of the output layer. It may stay the same for several steps."""

    std: th.Tensor

    def __init__(self, distribution: Any, log_std: Any = None, n_latents: int = 0):
        super().__init__(distribution, log_std, n_latents)
        self.register_buffer("std", distribution.get_std(log_std).detach().clone())

    def noise(self) -> list[Port]:
        return [Port("noise", "normal_noise", (self.n_latents, self.distribution.action_dim))]

    def deterministic(self, outputs: th.Tensor) -> th.Tensor:
        return outputs if self.distribution.bijector is None else th.tanh(outputs)

    def sample(self, outputs: th.Tensor, latents: th.Tensor, noise: list[th.Tensor]) -> th.Tensor:
        added = th.bmm(latents.unsqueeze(1), self.std * noise[0]).squeeze(1)
        return self.deterministic(outputs + added)


class BetaHead(Head):
    """
    Beta, from two gamma distributions with shapes of at least 1. Rejection sampling, https://doi.org/10.1145/358407.358414
    (Marsaglia and Tsang), with a fixed number of rounds: with a probability below 1e-10, none accepts, and the proposal of the
    last one is taken.
    """

    def _distribution(self, outputs: th.Tensor) -> Any:
        # ONNX Runtime has no softplus in float64. A copy, since nothing of the graph must stay in the distribution.
        return copy.copy(self.distribution).of_excess(F.softplus(outputs).double(), th.float32)

    def noise(self) -> list[Port]:
        shape = (2, self.distribution.action_dim, ROUNDS)
        return [Port("noise", "normal_noise", shape), Port("uniform", "uniform_noise", shape)]

    def deterministic(self, outputs: th.Tensor) -> th.Tensor:
        distribution = self._distribution(outputs)
        return distribution.mode() if distribution.deterministic_action == "mode" else distribution.mean()

    def sample(self, outputs: th.Tensor, latents: th.Tensor, noise: list[th.Tensor]) -> th.Tensor:
        distribution = self._distribution(outputs)
        shapes = th.stack([distribution.alpha, distribution.beta], dim=1).unsqueeze(-1)
        normal, uniform = (each.double() for each in noise)
        d = shapes - 1 / 3
        v = (1 + normal / (9 * d).sqrt()) ** 3
        positive = v.clamp(min=1e-300)
        accepted = (v > 0) & (uniform.log() < 0.5 * normal**2 + d * (1 - v + positive.log()))
        # The first round that accepts, or the last one
        rounds = th.arange(ROUNDS, 0, -1, dtype=th.float64)
        chosen = (accepted * rounds + (rounds == 1) * 0.5).argmax(dim=-1, keepdim=True)
        gammas = (d * positive).gather(-1, chosen).squeeze(-1)
        position = gammas[:, 0] / (gammas[:, 0] + gammas[:, 1])
        return position.clamp(EDGE, 1 - EDGE).float()


class CategoricalHead(Head):
    """Categorical distributions of one or more choices, masked or not: the largest logit, with Gumbel noise for samples."""

    def __init__(self, distribution: Any, log_std: Any = None, n_latents: int = 0):
        super().__init__(distribution, log_std, n_latents)
        dims = getattr(distribution, "action_dims", None)
        self.n_choices = [int(distribution.action_dim)] if dims is None else [int(n) for n in dims]
        self.is_single = dims is None

    def noise(self) -> list[Port]:
        return [Port("uniform", "uniform_noise", (sum(self.n_choices),))]

    def deterministic(self, outputs: th.Tensor) -> th.Tensor:
        chosen = [each.argmax(dim=1) for each in outputs.split(self.n_choices, dim=1)]
        return chosen[0] if self.is_single else th.stack(chosen, dim=1)

    def sample(self, outputs: th.Tensor, latents: th.Tensor, noise: list[th.Tensor]) -> th.Tensor:
        return self.deterministic(outputs - (-noise[0].log()).log())


class BernoulliHead(Head):
    """Independent choices between 0 and 1."""

    def noise(self) -> list[Port]:
        return [Port("uniform", "uniform_noise", (int(self.distribution.action_dims),))]

    def deterministic(self, outputs: th.Tensor) -> th.Tensor:
        return th.round(th.sigmoid(outputs))

    def sample(self, outputs: th.Tensor, latents: th.Tensor, noise: list[th.Tensor]) -> th.Tensor:
        return (noise[0] < th.sigmoid(outputs)).to(outputs.dtype)


class HybridHead(Head):
    """Independent parts."""

    def __init__(self, distribution: Any, log_std: Any = None, n_latents: int = 0):
        super().__init__(distribution)
        pairs = list(zip(distribution.parts, distribution.distributions, strict=True))
        self.heads = nn.ModuleList(
            make_head(each, log_std if part.family.has_log_std else None, n_latents) for part, each in pairs
        )
        self.n_outputs = [part.n_outputs for part, _ in pairs]

    def noise(self) -> list[Port]:
        ports: list[Port] = []
        for number, head in enumerate(self._heads()):
            for port in head.noise():
                ports.append(Port(f"{port.name}_{number}", port.role, port.shape))
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


HEADS: dict[str, type[Head]] = {
    "gaussian": GaussianHead,
    "state_dependent_noise": StateDependentNoiseHead,
    "squashed_gaussian": SquashedGaussianHead,
    "beta": BetaHead,
    "categorical": CategoricalHead,
    "multi_categorical": CategoricalHead,
    "masked_categorical": CategoricalHead,
    "masked_multi_categorical": CategoricalHead,
    "bernoulli": BernoulliHead,
    "hybrid": HybridHead,
}


def make_head(distribution: Any, log_std: Any, n_latents: int) -> Head:
    """
    :param distribution: Action distribution of the policy
    :param log_std: Parameter ``log_std`` of the policy, ``None`` if it has none
    :param n_latents: Number of inputs of the output layer
    :return: Head for its family
    :raises ValueError: if there is none
    """
    family = family_of(distribution)
    if family is None or family.name not in HEADS:
        remedy = f"its action distribution, {type(distribution).__name__}, cannot be exported; the families are "
        refuse("policy", type(distribution).__name__, remedy + ", ".join(HEADS))
    return HEADS[family.name](distribution, log_std, n_latents)


def masked_outputs(distribution: Any, outputs: th.Tensor, masks: th.Tensor) -> th.Tensor:
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
