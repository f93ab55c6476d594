"""
Smooth actions: Conditioning for Action Policy Smoothness (CAPS).

Paper: https://arxiv.org/abs/2012.06644
"""

from __future__ import annotations

from collections.abc import Mapping

import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ppo_ext.common.type_aliases import Arrays, Kwargs
from sb3_ppo_ext.common.validation import check_number, refuse
from sb3_ppo_ext.distributions import location
from sb3_ppo_ext.update.extra_loss import ExtraLoss, PolicyInputs, map_observed
from sb3_ppo_ext.update.losses import LossConfig


def smoothness_loss(actions: th.Tensor, others: th.Tensor, counts: th.Tensor | None = None) -> th.Tensor:
    """
    ``mean(||a - a'||)``, the mean Euclidean distance of two actions.

    :param actions: Deterministic actions a, shape ``(batch_size, n)``
    :param others: Deterministic actions a' for similar observations, shape ``(batch_size, n)``
    :param counts: Whether a distance counts, or else is taken to be 0, shape ``(batch_size,)``; ``None`` if all do
    :return: Scalar to minimise
    """
    # Its gradient is 0, not NaN, where the two are equal.
    distances: th.Tensor = th.linalg.vector_norm(actions - others, dim=1)
    return distances.mean() if counts is None else (distances * counts).mean()


class TemporalSmoothness(ExtraLoss):
    """
    ``mean(||pi(s_t) - pi(s_t+1)||)``, where s_t+1 is the observation that followed in the rollout. At the last step of an
    episode or of the rollout the distance counts as 0. Recurrent policies compute the next actions from the states that the
    rollout stored, so that these are approximations in the later steps of an update.

    :param coef: Coefficient, lambda_T in the paper
    """

    reads_next = True

    def value(self, inputs: PolicyInputs, config: LossConfig) -> th.Tensor:
        now, view = location(inputs.distribution), inputs.view
        # Not left to the distance of equal observations: rounding, or a state of the rollout, gives it a gradient of length 1.
        return smoothness_loss(now, location(view.get_distribution(view.next_observations)), view.continues)


class SpatialSmoothness(ExtraLoss):
    """
    ``mean(||pi(s) - pi(s')||)`` with s' from a Gaussian around s. Parts of observations that are images or integers stay as
    they are.

    :param coef: Coefficient, lambda_S in the paper
    :param std: Standard deviation sigma of the Gaussian, in units of the observations as the policy reads them
    :param keys: Keys of the observations that the noise is added to, ``None`` if they are no dictionaries
    """

    keywords = ("std",)
    remedy = "give a dictionary such as `dict(coef=0.1, std=0.05)`, with the expected noise of the measurements as `std`"

    def __init__(self, coef: float, std: float, keys: tuple[str, ...] | None = None):
        super().__init__(coef)
        self.std, self.keys = std, keys

    @classmethod
    def check(cls, where: str, keywords: Mapping[str, object]) -> None:
        check_number(f"{where}['std']", keywords["std"], 0, open_low=True)

    @classmethod
    def make(
        cls, where: str, coef: float, keywords: Kwargs, policy: ActorCriticPolicy, normalizer: VecNormalize | None
    ) -> SpatialSmoothness:
        space = policy.observation_space
        parts = space.spaces if isinstance(space, spaces.Dict) else {"": space}
        mask_key = getattr(policy, "action_mask_key", None)
        keys = tuple(key for key, part in parts.items() if _is_continuous(part) and key != mask_key)
        if not keys:
            refuse(where, dict(keywords, coef=coef), f"{space} has no floats to which noise can be added; leave it out")
        return cls(coef, keywords["std"], keys if isinstance(space, spaces.Dict) else None)

    def value(self, inputs: PolicyInputs, config: LossConfig) -> th.Tensor:
        similar = map_observed(self._perturbed, inputs.view.observations)
        return smoothness_loss(location(inputs.distribution), location(inputs.view.get_distribution(similar)))

    def _perturbed(self, observations: Arrays) -> Arrays:
        if self.keys is None:
            return self._with_noise(observations)
        return {key: self._with_noise(part) if key in self.keys else part for key, part in observations.items()}

    def _with_noise(self, part: th.Tensor) -> th.Tensor:
        return part + self.std * th.randn_like(part)


def _is_continuous(space: object) -> bool:
    return isinstance(space, spaces.Box) and space.dtype.kind == "f" and not is_image_space(space)
