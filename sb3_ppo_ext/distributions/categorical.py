"""SB3's distribution over the actions of a ``Discrete`` space (``CategoricalDistribution``)."""

from typing import TypeVar

import numpy as np
import torch as th
from stable_baselines3.common.distributions import CategoricalDistribution, Distribution
from torch.distributions import Categorical

from sb3_ppo_ext.common.guards import NO_ACTION
from sb3_ppo_ext.distributions.base import NumpyDistribution, Sampler
from sb3_ppo_ext.distributions.head import Head, Noise

SelfCategorical = TypeVar("SelfCategorical", bound="CategoricalOnDevice")


def parameters(distribution: CategoricalDistribution) -> th.Tensor:
    """
    :param distribution: Categorical distribution
    :return: Normalised logits, shape ``(batch_size, n_actions)``
    """
    return distribution.distribution.logits


def location(distribution: CategoricalDistribution) -> th.Tensor:
    """
    :param distribution: Categorical distribution
    :return: Probabilities, shape ``(batch_size, n_actions)``
    """
    return distribution.distribution.probs


def kl_divergence(old: th.Tensor, new: CategoricalDistribution) -> th.Tensor:
    """
    :param old: :func:`parameters` of a categorical distribution, shape ``(batch_size, n_actions)``
    :param new: Categorical distribution for the same observations
    :return: KL(old || new) in nats, shape ``(batch_size,)``
    """
    return divergence(old, new.distribution)


def divergence(old: th.Tensor, new: Categorical) -> th.Tensor:
    """
    :param old: Normalised logits, shape ``(batch_size, n_actions)``
    :param new: Distribution in PyTorch
    :return: KL(old || new) in nats, shape ``(batch_size,)``
    """
    # Not PyTorch's: of its gradient, `torch.compile` makes zeros where an action is impossible (2.13).
    probs = old.exp()
    return th.where(probs == 0, 0.0, probs * (old - new.logits)).sum(dim=-1)


def gumbel(*shape: int) -> np.ndarray:
    """
    :param shape: Shape
    :return: Gumbel noise. The argmax of logits with this noise is a sample (Gumbel-max trick)
    """
    noise: np.ndarray = -th.empty(*shape).exponential_().log_().numpy()
    return noise


def largest(outputs: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """
    :param outputs: Logits, shape ``(n, n_actions)``
    :param noise: Gumbel noise, the same shape
    :return: Samples, shape ``(n,)``
    """
    samples: np.ndarray = (outputs + noise).argmax(axis=1)
    return samples


class NumpyCategorical(NumpyDistribution):
    """NumPy implementation of SB3's ``CategoricalDistribution``. The outputs are the logits."""

    # Subclasses may compute differently.
    known: type[CategoricalDistribution] = CategoricalDistribution

    @classmethod
    def why_not(cls, distribution: Distribution) -> str | None:
        # SB3's `log_prob` takes actions of shape `(batch_size,)`, those of the buffer have one more dimension.
        return (
            None if type(distribution) is cls.known else f"{type(distribution).__name__} is not SB3's categorical distribution"
        )

    def noise(self, n_steps: int, n_envs: int, n_outputs: int) -> np.ndarray:
        return gumbel(n_steps, n_envs, n_outputs)

    def sampler(self) -> Sampler:
        return largest

    def compiled(self) -> tuple[str, tuple[int, ...]]:
        assert isinstance(self.distribution, CategoricalDistribution)
        return "categorical", (int(self.distribution.action_dim),)

    # The arrays have shape (n_actions, batch_size): NumPy is fast along the first dimension, but slow along a short last one.

    def _probabilities(self, outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        logits = outputs.T.copy()
        logits -= np.maximum.reduce(logits)
        probabilities = np.exp(logits)
        sums = np.add.reduce(probabilities)
        probabilities /= sums
        return probabilities, np.subtract(logits, np.log(sums), out=logits)

    def log_prob(self, outputs: np.ndarray, actions: np.ndarray) -> np.ndarray:
        self.probabilities, self.log_probabilities = self._probabilities(outputs)
        self.taken = (actions[:, 0].astype(np.int64), np.arange(len(actions)))
        return self.log_probabilities[self.taken]

    def entropies(self, described: np.ndarray) -> np.ndarray:
        probabilities, log_probabilities = self._probabilities(described)
        return -np.add.reduce(probabilities * log_probabilities)

    def _gradients(self, d_log_prob: np.ndarray, ent_coef: float) -> tuple[np.ndarray, None]:
        # d log p(a) / d logit_i = [i = a] - p_i
        gradient = self.probabilities * -d_log_prob
        gradient[self.taken] += d_log_prob
        if ent_coef != 0:
            weighted = self.probabilities * self.log_probabilities
            weighted -= self.probabilities * np.add.reduce(weighted)
            gradient += weighted * np.float32(ent_coef / weighted.shape[1])
        return np.ascontiguousarray(gradient.T), None


class CategoricalOnDevice(CategoricalDistribution):
    """SB3's categorical distribution, without validation."""

    # Whether an action is `NO_ACTION` where the outputs of the policy are not finite
    marks_actions = True

    def proba_distribution(self: SelfCategorical, action_logits: th.Tensor) -> SelfCategorical:
        self.distribution = Categorical(logits=action_logits, validate_args=False)
        return self

    def log_prob(self, actions: th.Tensor) -> th.Tensor:
        return log_prob_or_nan(self.distribution, actions)

    def sample(self) -> th.Tensor:
        return sample_without_wait(self.distribution.probs)

    def mode(self) -> th.Tensor:
        return marked(super().mode(), self.distribution.probs)


class CategoricalHead(Head):
    """Categorical distributions of one or more choices, masked or not: the largest logit, with Gumbel noise for samples."""

    def __init__(self, distribution: CategoricalDistribution, log_std: th.Tensor | None = None, n_latents: int = 0):
        super().__init__(distribution, log_std, n_latents)
        dims = getattr(distribution, "action_dims", None)
        self.n_choices = [int(distribution.action_dim)] if dims is None else [int(n) for n in dims]
        self.is_single = dims is None

    def noise(self) -> list[Noise]:
        return [Noise("uniform", "uniform", (sum(self.n_choices),))]

    def deterministic(self, outputs: th.Tensor) -> th.Tensor:
        chosen = [each.argmax(dim=1) for each in outputs.split(self.n_choices, dim=1)]
        return chosen[0] if self.is_single else th.stack(chosen, dim=1)

    def sample(self, outputs: th.Tensor, latents: th.Tensor, noise: list[th.Tensor]) -> th.Tensor:
        return self.deterministic(outputs - (-noise[0].log()).log())


def sample_without_wait(probs: th.Tensor) -> th.Tensor:
    """
    What ``torch.multinomial`` draws, with the same random numbers, but without its checks, which wait for the GPU.

    :param probs: Probabilities, shape ``(batch_size, n_actions)``
    :return: Samples, shape ``(batch_size,)``
    """
    probs = probs.detach()
    return marked((probs / th.empty_like(probs).exponential_()).argmax(dim=-1), probs)


def marked(actions: th.Tensor, probs: th.Tensor) -> th.Tensor:
    """
    :param actions: Actions, shape ``(batch_size,)``
    :param probs: Probabilities that they were chosen by, shape ``(batch_size, n_actions)``
    :return: Actions, and :data:`~sb3_ppo_ext.common.guards.NO_ACTION` where the probabilities are NaN
    """
    # A logit of NaN or infinity makes all probabilities NaN.
    return actions.masked_fill(probs[..., 0].isnan(), NO_ACTION)


def log_prob_or_nan(distribution: Categorical, actions: th.Tensor) -> th.Tensor:
    """
    :param distribution: Distribution in PyTorch
    :param actions: Actions, shape ``(batch_size,)``, which may be :data:`~sb3_ppo_ext.common.guards.NO_ACTION`
    :return: Their log probabilities, shape ``(batch_size,)``
    """
    # CUDA cannot be used any more after an index that is out of range. The logarithm is NaN then.
    return distribution.log_prob(actions.clamp(min=0))
