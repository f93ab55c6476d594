"""Normalisation of values: a critic that predicts returns in units of their running mean and standard deviation."""

from __future__ import annotations

import torch as th
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import nn

from sb3_ppo_ext.common.type_aliases import StateDict
from sb3_ppo_ext.distributed.ranks import SINGLE, Ranks


class NormalizedValue(nn.Linear):
    """
    The output layer of a critic, ``V = std * (W x + b) + mean``: its parameters predict normalised returns, while its outputs
    are values in the units of the return, for everything that reads them. When the statistics change, W and b are corrected so
    that the outputs stay the same.

    Papers: https://arxiv.org/abs/1602.07714 (Pop-Art), https://arxiv.org/abs/1809.04474

    :param layer: Output layer, whose parameters become those of this one
    """

    # Weight of the newest rollout in the moving averages, and smallest standard deviation
    ALPHA, MIN_STD = 0.05, 1e-4
    mean: th.Tensor
    std: th.Tensor
    averages: th.Tensor

    def __init__(self, layer: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.register_buffer("mean", self.weight.new_zeros(()))
        self.register_buffer("std", self.weight.new_ones(()))
        # Sum of the weights of all rollouts, and moving averages of the returns and of their squares, before this sum divides
        # them
        self.register_buffer("averages", self.weight.new_zeros(3, dtype=th.float64))

    def forward(self, latents: th.Tensor) -> th.Tensor:
        """
        :param latents: Outputs of the last hidden layer, shape ``(batch_size, in_features)``
        :return: Values in the units of the return, shape ``(batch_size, 1)``
        """
        # Outputs may be of lower precision.
        return super().forward(latents).to(self.weight.dtype) * self.std + self.mean

    @th.no_grad()
    def observe(self, returns: th.Tensor, ranks: Ranks = SINGLE) -> None:
        """
        Update the statistics with the returns of a rollout, without a change of the values. Returns that are not finite are
        ignored.

        :param returns: Returns of this rank, on the device of the layer, any shape
        :param ranks: Ranks of the training
        """
        returns = returns.double()
        sums = ranks.sum(th.stack([th.ones_like(returns).sum(), returns.sum(), returns.square().sum()]))
        averages = th.lerp(self.averages, sums / sums[0], self.ALPHA)
        is_usable = th.isfinite(averages).all()
        weight, first, second = averages
        mean = (first / weight).to(self.mean)
        variance = second / weight - (first / weight).square()
        std = variance.clamp(min=0).sqrt().clamp(min=self.MIN_STD).to(self.std)
        self._set(th.where(is_usable, mean, self.mean), th.where(is_usable, std, self.std))
        self.averages.copy_(th.where(is_usable, averages, self.averages))

    def _set(self, mean: th.Tensor, std: th.Tensor) -> None:
        """Replace the statistics, and correct the parameters, in float64."""
        weight, bias, old_mean, old_std = (part.double() for part in (self.weight, self.bias, self.mean, self.std))
        self.weight.copy_(weight * (old_std / std.double()))
        self.bias.copy_((old_std * bias + old_mean - mean.double()) / std.double())
        self.mean.copy_(mean)
        self.std.copy_(std)

    def _load_from_state_dict(self, state_dict: dict[str, object], prefix: str, *args: object, **kwargs: object) -> None:
        # Parameters of a critic without these statistics predict values.
        if f"{prefix}weight" in state_dict and f"{prefix}averages" not in state_dict:
            initial = {"mean": th.zeros(()), "std": th.ones(()), "averages": th.zeros(3, dtype=th.float64)}
            state_dict.update({prefix + name: value for name, value in initial.items()})
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def normalized_value(policy: ActorCriticPolicy) -> NormalizedValue | None:
    """
    :param policy: Actor-critic policy
    :return: Output layer of its critic, ``None`` if that does not normalise values
    """
    layer = getattr(policy, "value_net", None)
    return layer if isinstance(layer, NormalizedValue) else None


def without_statistics(state: StateDict, prefix: str = "value_net.") -> StateDict:
    """
    :param state: Parameters of a policy, by name
    :param prefix: Prefix of the names of the critic's output layer
    :return: Parameters with the same values for a policy that does not normalise values
    """
    state = dict(state)
    if f"{prefix}averages" in state:
        mean, std, _ = (state.pop(prefix + name) for name in ("mean", "std", "averages"))
        state[f"{prefix}weight"] = state[f"{prefix}weight"] * std
        state[f"{prefix}bias"] = state[f"{prefix}bias"] * std + mean
    return state
