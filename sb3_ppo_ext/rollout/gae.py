"""Estimates over time: generalised advantages (GAE) and V-trace, computed by a parallel scan over the steps."""

from __future__ import annotations

import torch as th


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
    return vtrace(*arguments)[0]


def vtrace(
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
    :return: Advantages, and returns ``A + V`` as targets of the value function, both of shape ``(n_steps, n_envs)``
    """
    # Not all other devices have float64.
    precision = th.float64 if values.device.type == "cpu" else values.dtype
    ratio = log_ratio.to(precision).clamp(-20.0, 20.0).exp()
    discounts = gamma * (1.0 - th.cat([episode_starts[1:], last_dones.to(episode_starts).unsqueeze(0)]).to(precision))
    next_values = th.cat([values[1:], last_values.unsqueeze(0)])
    deltas = ratio.clamp(max=rho_bar) * (rewards + discounts * next_values - values)
    advantages = discounted_sums(deltas, gae_lambda * discounts * ratio.clamp(max=c_bar))
    return advantages.to(values.dtype), (advantages + values).to(values.dtype)
