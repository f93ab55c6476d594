"""Advantages: off-policy correction with V-trace, and normalisation."""

from typing import Any

import numpy as np
import torch as th

from sb3_ppo_ext.common.schedules import in_float32_range
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


def vtrace(
    rewards: np.ndarray,
    values: np.ndarray,
    log_ratio: np.ndarray,
    episode_starts: np.ndarray,
    last_values: np.ndarray,
    last_dones: np.ndarray,
    gamma: float,
    gae_lambda: float,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """
    Advantages under the current policy, estimated with V-trace from a rollout of an older policy.

    With ``rho = min(rho_bar, ratio)`` and ``c = gae_lambda * min(c_bar, ratio)``,
    ``delta_t = rho_t (r_t + gamma nt_t V_{t+1} - V_t)`` and ``A_t = delta_t + gamma nt_t c_t A_{t+1}``, where ``nt`` is 0
    at the end of an episode and 1 elsewhere. If both policies are equal and ``rho_bar`` and ``c_bar`` are at least 1, this is
    Generalized Advantage Estimation (GAE).

    Paper: https://arxiv.org/abs/1802.01561

    :param rewards: Rewards, shape ``(n_steps, n_envs)``, which include the discounted value of the terminal observation where
        an episode was truncated
    :param values: Values V of the observations, shape ``(n_steps, n_envs)``
    :param log_ratio: Log probabilities of the actions under the current policy minus those under the policy that collected
        the rollout, shape ``(n_steps, n_envs)``; clamped to [-20, 20]
    :param episode_starts: Whether an episode starts at the step, shape ``(n_steps, n_envs)``
    :param last_values: Values of the observations after the last step, shape ``(n_envs,)``
    :param last_dones: Whether the last step ended an episode, shape ``(n_envs,)``
    :param gamma: Discount factor
    :param gae_lambda: Factor for the trade-off of bias and variance
    :param rho_bar: Upper bound of rho; the larger it is, the closer the fixed point is to the value function of the current
        policy
    :param c_bar: Upper bound of the ratio in c; the smaller it is, the lower is the variance
    :return: Advantages, and returns ``A + V`` as targets of the value function, both float32 of shape ``(n_steps, n_envs)``
    """
    ratio = np.exp(np.clip(log_ratio.astype(np.float64), -20.0, 20.0))
    rho, c = np.minimum(rho_bar, ratio), gae_lambda * np.minimum(c_bar, ratio)
    not_done = 1.0 - np.concatenate([episode_starts[1:], last_dones[np.newaxis]]).astype(np.float64)
    next_values = np.concatenate([values[1:], last_values[np.newaxis]])
    deltas = rho * (rewards + gamma * not_done * next_values - values)
    traces = gamma * not_done * c
    advantages = np.zeros_like(deltas)
    following = np.zeros_like(deltas[0])
    for step in reversed(range(len(deltas))):
        advantages[step] = following = deltas[step] + traces[step] * following
    return advantages.astype(np.float32), (advantages + values).astype(np.float32)


def discounted_sums(deltas: th.Tensor, decays: th.Tensor) -> th.Tensor:
    """
    Solve ``A_t = delta_t + decay_t A_{t+1}`` for all steps, with ``A_n = 0``, by a parallel scan: the number of operations on
    whole tensors grows with the logarithm of the number of steps (Hillis and Steele, https://doi.org/10.1145/7902.7903).

    :param deltas: Summands, shape ``(n_steps, ...)``
    :param decays: Factors, of the same shape
    :return: Sums, of the same shape
    """
    sums, distance = deltas, 1
    while distance < len(deltas):
        reaching = decays[:-distance]
        sums = th.cat([sums[:-distance] + reaching * sums[distance:], sums[-distance:]])
        decays = th.cat([reaching * decays[distance:], decays[-distance:]])
        distance *= 2
    return sums


def gae_of_tensors(
    rewards: th.Tensor,
    values: th.Tensor,
    episode_starts: th.Tensor,
    last_values: th.Tensor,
    last_dones: th.Tensor,
    gamma: float,
    gae_lambda: float,
) -> th.Tensor:
    """
    Generalized Advantage Estimation, as ``compute_returns_and_advantage`` of SB3's rollout buffer, on the device of the
    tensors.

    Paper: https://arxiv.org/abs/1506.02438

    :param rewards: Rewards, shape ``(n_steps, n_envs)``, which include the discounted value of the terminal observation where
        an episode was truncated
    :param values: Values of the observations, shape ``(n_steps, n_envs)``
    :param episode_starts: 1 where an episode starts at the step, else 0, shape ``(n_steps, n_envs)``
    :param last_values: Values of the observations after the last step, shape ``(n_envs,)``
    :param last_dones: 1 where the last step ended an episode, else 0, shape ``(n_envs,)``
    :param gamma: Discount factor
    :param gae_lambda: Factor for the trade-off of bias and variance
    :return: Advantages, shape ``(n_steps, n_envs)``
    """
    arguments = (rewards, values, th.zeros_like(values), episode_starts, last_values, last_dones, gamma, gae_lambda)
    return vtrace_of_tensors(*arguments)[0]


def vtrace_of_tensors(
    rewards: th.Tensor,
    values: th.Tensor,
    log_ratio: th.Tensor,
    episode_starts: th.Tensor,
    last_values: th.Tensor,
    last_dones: th.Tensor,
    gamma: float,
    gae_lambda: float,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> tuple[th.Tensor, th.Tensor]:
    """
    :func:`vtrace` on the device of the tensors, in their precision.

    :param rewards: As for :func:`vtrace`, as all arguments
    :param values: Values of the observations
    :param log_ratio: Log probabilities under the current policy minus those under the policy that collected the rollout
    :param episode_starts: 1 where an episode starts at the step, else 0
    :param last_values: Values of the observations after the last step
    :param last_dones: 1 where the last step ended an episode, else 0
    :param gamma: Discount factor
    :param gae_lambda: Factor for the trade-off of bias and variance
    :param rho_bar: Upper bound of rho
    :param c_bar: Upper bound of the ratio in c
    :return: Advantages and returns, shape ``(n_steps, n_envs)``
    """
    ratio = log_ratio.clamp(-20.0, 20.0).exp()
    discounts = gamma * (1.0 - th.cat([episode_starts[1:], last_dones.to(episode_starts).unsqueeze(0)]))
    next_values = th.cat([values[1:], last_values.unsqueeze(0)])
    deltas = ratio.clamp(max=rho_bar) * (rewards + discounts * next_values - values)
    advantages = discounted_sums(deltas, gae_lambda * discounts * ratio.clamp(max=c_bar))
    return advantages, advantages + values


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

    def state_dict(self) -> dict[str, Any]:
        """:return: Averages and current statistics"""
        return {
            "warm_start": self.warm_start,
            "average": list(self._average),
            "weight": self._weight,
            "mean": self.mean,
            "std": self.std,
        }

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
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
