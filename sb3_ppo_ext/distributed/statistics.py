"""Statistics over all ranks: moments of arrays, and the running statistics of ``VecNormalize``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch as th
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ppo_ext.distributed.ranks import SINGLE, Ranks

Numbers = TypeVar("Numbers", np.ndarray, th.Tensor)


class Moments(NamedTuple):
    """
    Statistics of numbers.

    :param n: How many they are
    :param mean: Mean
    :param variance: Variance, with a divisor of ``n``
    :param low: Smallest number
    :param high: Largest number
    """

    n: float
    mean: float
    variance: float
    low: float
    high: float

    @classmethod
    def of(cls, values: np.ndarray | th.Tensor, ranks: Ranks) -> Moments:
        """
        :param values: Numbers of this rank, any shape; there may be none
        :param ranks: Ranks of the training
        :return: Statistics of the numbers of all ranks
        """
        array = np.asarray(values.detach().cpu() if isinstance(values, th.Tensor) else values).astype(np.float64).ravel()
        bounds = (array.min(), array.max()) if array.size else (np.inf, -np.inf)
        n, total = ranks.sums(np.array([array.size, array.sum()]))
        mean = total / n
        (squares,) = ranks.sums(np.array([np.square(array - mean).sum()]))
        extremes = np.zeros((ranks.size, 2))
        extremes[ranks.index] = bounds
        # Infinity of other ranks would spoil a sum with zeros only where there are no numbers at all.
        extremes = ranks.sums(np.nan_to_num(extremes, posinf=np.finfo(float).max, neginf=np.finfo(float).min))
        return cls(n, mean, squares / n, extremes[:, 0].min(), extremes[:, 1].max())


def mean_and_std_of_each(own: th.Tensor, ranks: Ranks) -> tuple[th.Tensor, th.Tensor]:
    """
    Statistics of several groups of numbers, each of which is spread over the ranks.

    :param own: Number and mean of the numbers of this rank in each group, and the sum of their squared differences from this
        mean, shape ``(3, n_groups)``; zeros for a group without numbers
    :param ranks: Ranks of the training
    :return: Means and standard deviations (with a divisor of n - 1) of each group, both of shape ``(n_groups,)``
    """
    of_all = own.new_zeros(ranks.size, *own.shape)
    of_all[ranks.index] = own
    n, means, squares = ranks.sum(of_all).unbind(1)
    total = n.sum(dim=0)
    mean = (n * means).sum(dim=0) / total
    squares = (squares + n * (means - mean).square()).sum(dim=0)
    return mean, (squares / (total - 1).clamp(min=1)).sqrt()


def rows_of_all(ranks: Ranks, n_rows: int, delta: Numbers, var: Numbers) -> tuple[Any, Numbers, Numbers]:
    """
    :param ranks: Ranks of the training
    :param n_rows: Number of rows of this rank
    :param delta: Mean of the rows, as the difference from a point that is the same on all ranks, an array or tensor in float64
    :param var: Variance of the rows, of the same shape
    :return: The same for the rows of all ranks
    """
    # NumPy's arrays stay arrays: operations on small tensors take several times as long.
    size = 1 + 2 * int(np.prod(delta.shape))
    own: Any = th.empty(size, dtype=th.float64, device=delta.device) if isinstance(delta, th.Tensor) else np.empty(size)
    own[0], rows = n_rows, own[1:].reshape(2, *delta.shape)
    rows[0], rows[1] = n_rows * delta, n_rows * (var + delta * delta)
    sums: Any = ranks.sum(own) if isinstance(own, th.Tensor) else ranks.sums(own)
    n, (first, second) = sums[0], sums[1:].reshape(2, *delta.shape) / sums[0].clip(min=1)
    return n, first, (second - first * first).clip(min=0)


class SharedMeanStd(RunningMeanStd):
    """
    SB3's ``RunningMeanStd``, updated with the numbers of all ranks, so that it is the same on each of them. Copies and pickles
    are a ``RunningMeanStd``.

    :param source: Statistics to begin with
    :param ranks: Ranks of the training
    """

    def __init__(self, source: RunningMeanStd, ranks: Ranks):
        self.mean, self.var, self.count = source.mean, source.var, source.count
        self.ranks = ranks

    def update(self, arr: np.ndarray) -> None:
        """
        :param arr: New rows of this rank, shape ``(n_rows, *shape)``
        """
        self._update(np.asarray(np.mean(arr, axis=0)), np.asarray(np.var(arr, axis=0)), arr.shape[0])

    def update_with_nothing(self) -> None:
        """Take part in an update of the other ranks, without rows of this one."""
        self._update(np.zeros_like(self.mean), np.zeros_like(self.var), 0)

    def _update(self, mean: np.ndarray, variance: np.ndarray, n_rows: int) -> None:
        # Differences from the running mean, which is the same on all ranks: their squares do not cancel as those from 0 would.
        delta = np.asarray(mean - self.mean, np.float64)
        n, delta, variances = rows_of_all(self.ranks, n_rows, delta, np.asarray(variance, np.float64))
        if n > 0:
            self.update_from_moments(self.mean + delta, variances, float(n))

    def __deepcopy__(self, memo: Any) -> RunningMeanStd:
        return self.copy()

    def __reduce__(self) -> Any:
        plain = self.copy()
        return object.__new__, (RunningMeanStd,), vars(plain)


def _statistics(normalizer: VecNormalize) -> Iterator[tuple[Any, Any]]:
    """Where a ``VecNormalize`` keeps running statistics, in the order in which it updates them: container and key."""
    attributes = vars(normalizer)
    if normalizer.norm_obs and "obs_rms" in attributes:
        kept = attributes["obs_rms"]
        yield from ((kept, key) for key in kept) if isinstance(kept, dict) else [(attributes, "obs_rms")]
    yield attributes, "ret_rms"


def share_statistics(normalizers: list[VecNormalize], ranks: Ranks) -> None:
    """
    Let normalisers update their running statistics with the numbers of all ranks. They begin with those of rank 0. Statistics
    with an attribute ``ranks`` do so by themselves.

    :param normalizers: Normalisers of the training
    :param ranks: Ranks of the training
    """
    for container, key in (place for each in normalizers for place in _statistics(each)):
        shared = container[key]
        if type(shared) is RunningMeanStd:
            shared = container[key] = SharedMeanStd(shared, ranks)
        if shared.ranks is not ranks or isinstance(shared, SharedMeanStd):
            shared.ranks = ranks
            shared.mean, shared.var, shared.count = ranks.gather((shared.mean, shared.var, shared.count))[0]


def unshare_statistics(normalizers: list[VecNormalize]) -> None:
    """
    Undo :func:`share_statistics`.

    :param normalizers: Normalisers of the training
    """
    for container, key in (place for each in normalizers for place in _statistics(each)):
        if isinstance(container[key], SharedMeanStd):
            container[key] = container[key].copy()
        elif hasattr(container[key], "ranks"):
            container[key].ranks = SINGLE


class FixedMeanStd(RunningMeanStd):
    """
    Running statistics that are not updated.

    :param source: Statistics, in NumPy or in tensors
    """

    def __init__(self, source: Any):
        self.source: Any = source.clone() if hasattr(source, "clone") else None
        self.mean, self.var, self.count = np.copy(source.mean), np.copy(source.var), float(source.count)

    def update(self, arr: np.ndarray) -> None:
        """Do nothing."""

    def update_tensor(self, batch: th.Tensor) -> None:
        """Do nothing."""

    def normalized(self, *arguments: Any, **keywords: Any) -> th.Tensor:
        """:return: Rows normalised by statistics in tensors"""
        rows: th.Tensor = self.source.normalized(*arguments, **keywords)
        return rows


def fixed_statistics(normalizers: list[VecNormalize]) -> list[FixedMeanStd]:
    """
    :param normalizers: Normalisers
    :return: Their statistics as they are
    """
    return [FixedMeanStd(container[key]) for each in normalizers for container, key in _statistics(each)]


def set_statistics(normalizers: list[VecNormalize], statistics: list[FixedMeanStd]) -> None:
    """
    :param normalizers: Normalisers, which do not share their statistics
    :param statistics: Statistics from :func:`fixed_statistics` for them
    """
    places = [place for each in normalizers for place in _statistics(each)]
    for (container, key), each in zip(places, statistics, strict=True):
        container[key] = each


def update_with_nothing(normalizers: list[VecNormalize], n_steps: int) -> None:
    """
    Take part in the updates of the other ranks, after this one has stopped to step its environments.

    :param normalizers: Normalisers of the training
    :param n_steps: Number of steps that the other ranks make
    """
    # The innermost one is updated first.
    training = [each for each in reversed(normalizers) if each.training and not getattr(each, "is_frozen", False)]
    for _ in range(n_steps):
        for container, key in (place for each in training for place in _statistics(each)):
            container[key].update_with_nothing()
