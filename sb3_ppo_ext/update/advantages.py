"""Normalisation of advantages."""

import numpy as np
import torch as th

from sb3_ppo_ext.common.schedules import in_float32_range
from sb3_ppo_ext.common.type_aliases import StateDict
from sb3_ppo_ext.distributed.ranks import SINGLE, Ranks
from sb3_ppo_ext.distributed.statistics import Moments, Numbers


def normalize(advantages: th.Tensor) -> th.Tensor:
    """
    Normalise advantages to mean 0 and standard deviation 1: ``(A - mean) / (std + 1e-8)``.

    :param advantages: Advantages, shape ``(batch_size,)``
    :return: Normalised advantages, shape ``(batch_size,)``; a single advantage is returned unchanged, since its standard
        deviation is not defined (`issue #325 <https://github.com/DLR-RM/stable-baselines3/issues/325>`_)
    """
    if len(advantages) <= 1:
        return advantages
    return standardize(advantages, advantages.mean(), advantages.std())


def standardize(advantages: Numbers, mean: Numbers | float, std: Numbers | float) -> Numbers:
    """
    :param advantages: Advantages, tensor or array of shape ``(batch_size,)``
    :param mean: Their mean
    :param std: Their standard deviation
    :return: Normalised advantages, shape ``(batch_size,)``
    """
    return (advantages - mean) / (std + 1e-8)


def normalize_over(ranks: Ranks, advantages: th.Tensor) -> th.Tensor:
    """
    :param ranks: Ranks of the training
    :param advantages: Advantages of this rank, shape ``(n,)``
    :return: Advantages normalised with the statistics of all ranks, shape ``(n,)``
    """
    if not ranks.are_several:
        return normalize(advantages)
    moments = Moments.of(advantages, ranks)
    normalized: th.Tensor = standardize(advantages, moments.mean, (moments.variance * moments.n / (moments.n - 1)) ** 0.5)
    return normalized


class AdvantageNormalizer:
    """
    Normalises advantages by exponential moving averages (EMA) of their statistics over the rollouts:
    ``clip((A - mean) / max(std, min_std), -clip, clip)``.

    With ``warm_start``, the averages are those of ``A`` and ``A^2``, in float64, divided by the sum of their weights (the bias
    correction of Adam, ``1 - (1 - alpha)^k`` after k rollouts), and include a rollout before it is normalised: the first
    rollout is normalised by its own statistics. Without it, the scheme is that of ProtoMotions
    (https://github.com/NVlabs/ProtoMotions): mean and standard deviation start at 0 and 1, the averages are those of the means
    and standard deviations, and include a rollout after it has been normalised, with its clipped advantages.

    :param alpha: Weight of the newest rollout, in (0, 1]
    :param warm_start: Whether to use the first of the two schemes
    :param min_std: Smallest divisor, in units of the advantage
    :param clip: Largest absolute value of a normalised advantage
    :param shift_mean: Whether the mean is subtracted; the standard deviation is computed about the mean in both cases
    """

    def __init__(
        self, alpha: float, warm_start: bool = True, min_std: float = 1e-8, clip: float = 4.0, shift_mean: bool = True
    ):
        self.alpha, self.warm_start, self.shift_mean = alpha, warm_start, shift_mean
        self.min_std, self.clip = in_float32_range(min_std), in_float32_range(clip)
        # Statistics that normalise the last observed rollout
        self.mean, self.std = 0.0, 1.0
        self._average = (0.0, 0.0) if warm_start else (0.0, 1.0)
        self._weight = 0.0

    def observe(self, advantages: th.Tensor, ranks: Ranks = SINGLE) -> None:
        """
        Update the averages with a rollout, and set the statistics that :meth:`normalize` uses until the next one. A rollout
        that is not finite is ignored, since the averages would never recover from it.

        :param advantages: Raw advantages of a whole rollout, any shape
        :param ranks: Ranks of the training, whose rollouts are observed together
        """
        advantages = advantages.detach().cpu().double()  # not every device has float64
        if not self._are_finite(advantages, ranks):
            return
        if self.warm_start:
            n, (mean, mean_square) = advantages.numel() * ranks.size, self._means(advantages, ranks)
            self._update(mean, mean_square)
            first, second = (average / self._weight for average in self._average)
            self.mean, self.std = first, (max(second - first**2, 0.0) * n / max(n - 1, 1)) ** 0.5
        else:
            self.mean, self.std = self._average
            used = self._shift() + self._scale() * self.normalize(advantages)
            self._update(*self._mean_and_std(used, ranks))

    @staticmethod
    def _are_finite(advantages: th.Tensor, ranks: Ranks) -> bool:
        are_finite = bool(th.isfinite(advantages).all())
        return are_finite if not ranks.are_several else all(ranks.gather(are_finite))

    @staticmethod
    def _means(advantages: th.Tensor, ranks: Ranks) -> tuple[float, float]:
        """Mean, and mean of the squares."""
        means = np.array([advantages.mean().item(), advantages.square().mean().item()])
        first, second = (ranks.sums(means) / ranks.size).tolist()
        return first, second

    @staticmethod
    def _mean_and_std(used: th.Tensor, ranks: Ranks) -> tuple[float, float]:
        if not ranks.are_several:
            return used.mean().item(), used.std(correction=min(used.numel() - 1, 1)).item() + 1e-8
        moments = Moments.of(used, ranks)
        return moments.mean, (moments.variance * moments.n / max(moments.n - 1, 1)) ** 0.5 + 1e-8

    def normalize(self, advantages: th.Tensor) -> th.Tensor:
        """
        :param advantages: Raw advantages, any shape
        :return: Normalised and clipped advantages, of the same shape and dtype
        """
        return self._standardize(advantages).clamp(-self.clip, self.clip)

    def clamped_fraction(self, advantages: th.Tensor) -> th.Tensor:
        """
        :param advantages: Raw advantages, any shape
        :return: Fraction of the advantages that :meth:`normalize` clips, a scalar
        """
        return (self._standardize(advantages).abs() > self.clip).float().mean()

    def state_dict(self) -> StateDict:
        """:return: Averages and current statistics"""
        return {
            "warm_start": self.warm_start,
            "average": list(self._average),
            "weight": self._weight,
            "mean": self.mean,
            "std": self.std,
        }

    def load_state_dict(self, state: StateDict, strict: bool = True) -> None:
        """
        :param state: State from :meth:`state_dict`; ignored if it is that of the other scheme, which averages other quantities
        :param strict: Unused, for compatibility with ``th.nn.Module``
        """
        if state["warm_start"] == self.warm_start:
            self._average, self._weight = tuple(state["average"]), state["weight"]
            self.mean, self.std = state["mean"], state["std"]

    def _update(self, first: float, second: float) -> None:
        alpha, (old_first, old_second) = self.alpha, self._average
        self._average = ((1 - alpha) * old_first + alpha * first, (1 - alpha) * old_second + alpha * second)
        self._weight = (1 - alpha) * self._weight + alpha

    def _standardize(self, advantages: th.Tensor) -> th.Tensor:
        return (advantages - self._shift()) / self._scale()

    def _shift(self) -> float:
        return self.mean if self.shift_mean else 0.0

    def _scale(self) -> float:
        return max(self.std, self.min_std)
