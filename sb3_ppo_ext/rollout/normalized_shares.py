"""Rollouts whose environments do not wait for each other, with statistics that do not change in a rollout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from sb3_ppo_ext.common.type_aliases import Arrays, JaxTree
from sb3_ppo_ext.envs.normalizer import Normalizer
from sb3_ppo_ext.envs.parallel.share_rollout import JaxActor, ShareActor, ShareRollout


class NormalizingShareActor(ShareActor):
    """
    An actor for some of the environments that reads normalised observations.

    :param actor: Actor for these environments
    :param normalizer: Statistics, which stay as they are
    """

    def __init__(self, actor: ShareActor, normalizer: Normalizer):
        self.actor, self.normalizer = actor, normalizer

    def act(self, observations: Arrays, step: int) -> tuple[np.ndarray, Arrays] | None:
        return self.actor.act(self.normalizer.observations(observations), step)

    def in_jax(self) -> JaxActor | None:
        if (inner := self.actor.in_jax()) is None:
            return None
        normalizer = self.normalizer

        def act(parameters: JaxTree, noise: JaxTree, observations: JaxTree) -> JaxTree:
            scales, of_actor = parameters
            return inner.act(of_actor, noise, normalizer.scaled(observations, scales))

        key = ("normalized", normalizer.clip_obs, inner.key)
        return inner._replace(act=act, key=key, parameters=(normalizer.scales(), inner.parameters))


def normalizing(make_actor: Callable[[slice], ShareActor], normalizer: Normalizer) -> Callable[[slice], ShareActor]:
    """
    :param make_actor: Function that makes the actor for some environments
    :param normalizer: Statistics of the model
    :return: The same, for actors that read normalised observations
    """
    frozen = normalizer.frozen()
    return lambda share: NormalizingShareActor(make_actor(share), frozen)


def normalized_rollout(rollout: ShareRollout, normalizer: Normalizer) -> ShareRollout:
    """
    :param rollout: Rollout of the environments
    :param normalizer: Statistics that were those of the whole rollout
    :return: What the policy has read, and the rewards that it is trained with
    """
    observations = normalizer.observations(rollout.observations)
    return replace(rollout, observations=observations, rewards=normalizer.rewards(rollout.rewards))
