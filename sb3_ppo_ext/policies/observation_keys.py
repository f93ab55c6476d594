"""
Policies whose actor and critic read different keys of the observations (asymmetric actor-critic): the critic may read what is
known only in training.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.preprocessing import preprocess_obs
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs
from torch import nn

from sb3_ppo_ext.common.type_aliases import Arrays, Kwargs
from sb3_ppo_ext.common.validation import BadArgumentError, check_type, refuse
from sb3_ppo_ext.policies.networks import NetTypeMixin, layers_of

SelfObservationKeys = TypeVar("SelfObservationKeys", bound="ObservationKeysMixin")
# Keywords with the keys that each of the two networks reads
KEYWORDS = ("actor_keys", "critic_keys")


class ObservationKeysMixin(NetTypeMixin):
    """
    Mixin that lets actor and critic of a policy of SB3 read some keys of a Dict observation each. If these differ, each has a
    features extractor of its own, made for the space of its keys. The actor does not need what only the critic reads:
    ``predict`` and ``get_distribution`` take observations without it.

    Paper: https://arxiv.org/abs/1710.06542

    :param observation_space: Observation space
    :param action_space: Action space
    :param lr_schedule: Learning rate schedule
    :param actor_keys: Keys of the observations that the actor reads, ``None`` for all
    :param critic_keys: Keys of the observations that the critic reads, ``None`` for all
    :param with_critic: Whether there is a critic, see :meth:`without_critic`
    :param kwargs: Keyword arguments of SB3's policy, and of :class:`~sb3_ppo_ext.policies.networks.NetTypeMixin`
    :raises ValueError: if the observation space has no such keys, or ``share_features_extractor=True`` is given with different
        keys
    """

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        lr_schedule: Schedule,
        *args: Any,
        actor_keys: list[str] | None = None,
        critic_keys: list[str] | None = None,
        with_critic: bool = True,
        **kwargs: Any,
    ):
        check_type("with_critic", with_critic, (bool, np.bool_), "give True or False")
        self.actor_keys, self.critic_keys, self.with_critic = actor_keys, critic_keys, bool(with_critic)
        # Keys in the order of the space, `None` if both networks read the observations as they are
        self._read_by_actor = self._read_by_critic = None
        check_keys(observation_space, actor_keys, critic_keys, self._not_read)
        if actor_keys is not None or critic_keys is not None or self._not_read:
            self._read_by_actor = _in_order(observation_space, actor_keys, self._not_read)
            self._read_by_critic = _in_order(observation_space, critic_keys, self._not_read)
        if self.is_asymmetric:
            if kwargs.get("share_features_extractor", False):
                remedy = "actor and critic read different keys, each with a features extractor of its own; leave it out"
                refuse("share_features_extractor", True, remedy)
            kwargs["share_features_extractor"] = False
        super().__init__(observation_space, action_space, lr_schedule, *args, **kwargs)

    @property
    def is_asymmetric(self) -> bool:
        """Whether actor and critic read different keys."""
        return bool(self._read_by_actor != self._read_by_critic)

    def _build(self, lr_schedule: Schedule) -> None:
        super()._build(lr_schedule)
        if not self.with_critic:
            self.value_net: Any = NoCritic()

    # For subclasses

    @property
    def _not_read(self) -> tuple[str, ...]:
        """Keys of parts of the observations that are no features, which neither network reads."""
        return ()

    def _as_read(self, parts: object) -> Any:
        """What a features extractor reads of the selected parts of observations, or of their space."""
        return parts

    # What actor and critic read

    def make_features_extractor(self) -> BaseFeaturesExtractor:
        """:return: Features extractor for what the actor reads in the first call, for what the critic reads in the second"""
        keys = self._read_by_actor if self.features_extractor is None else self._read_by_critic
        if keys is None:
            return super().make_features_extractor()
        space = select_space(self.observation_space, keys)
        extractor: Any = self.features_extractor_class(self._as_read(space), **self.features_extractor_kwargs)
        return extractor

    def _build_mlp_extractor(self) -> None:
        for_actor, for_critic = self.pi_features_extractor.features_dim, self.vf_features_extractor.features_dim
        if for_actor == for_critic:
            super()._build_mlp_extractor()
        else:
            self.mlp_extractor = self.make_networks(for_actor, for_critic)

    def features_of(self, obs: PyTorchObs, extractor: nn.Module) -> th.Tensor:
        """
        :param obs: Observations
        :param extractor: Features extractor of the actor or of the critic
        :return: Features of what this network reads, shape ``(batch_size, features_dim)``
        """
        of_critic = extractor is self.vf_features_extractor
        keys = self._read_by_critic if of_critic else self._read_by_actor
        if keys is None:
            return BasePolicy.extract_features(self, obs, extractor)  # type: ignore[arg-type]
        parts: Arrays = select("critic" if of_critic else "actor", obs, keys)
        preprocessed = preprocess_obs(parts, self.observation_space, normalize_images=self.normalize_images)
        features: th.Tensor = extractor(self._as_read(preprocessed))
        return features

    def extract_features(self, obs: PyTorchObs, features_extractor: BaseFeaturesExtractor | None = None) -> Any:
        """
        :param obs: Observations
        :param features_extractor: Features extractor, ``None`` for that of the policy
        :return: Features, a pair of them for actor and critic if each has a features extractor of its own
        """
        if self._read_by_actor is None:
            return super().extract_features(obs, features_extractor)
        if features_extractor is not None or self.share_features_extractor:
            return self.features_of(obs, features_extractor or self.features_extractor)
        return self.features_of(obs, self.pi_features_extractor), self.features_of(obs, self.vf_features_extractor)

    def get_distribution(self, obs: PyTorchObs) -> Distribution:
        """
        :param obs: Observations, of which only what the actor reads is needed
        :return: Action distribution of these observations
        """
        if self._read_by_actor is None:
            return super().get_distribution(obs)
        latent_pi = self.mlp_extractor.forward_actor(self.features_of(obs, self.pi_features_extractor))
        return self._get_action_dist_from_latent(latent_pi)

    def predict_values(self, obs: PyTorchObs) -> th.Tensor:
        """
        :param obs: Observations, of which only what the critic reads is needed
        :return: Estimated values, shape ``(batch_size, 1)``
        """
        if self._read_by_actor is None:
            return super().predict_values(obs)
        latent_vf = self.mlp_extractor.forward_critic(self.features_of(obs, self.vf_features_extractor))
        return self.value_net(latent_vf)

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: Any = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[np.ndarray, Any]:
        """
        Get the policy's action from an observation.

        :param observation: Observation of one environment or of several; what only the critic reads may be missing
        :param state: Not used, see the history-based policies
        :param episode_start: Not used
        :param deterministic: Whether to return the deterministic action instead of a sample
        :return: Action of each environment, and the given state
        :raises ValueError: if the observation lacks what the actor reads
        """
        return super().predict(self.seen_by_actor(observation), state, episode_start, deterministic)

    def seen_by_actor(self, observation: VecEnvObs) -> Arrays:
        """
        :param observation: Observation as ``predict`` takes it
        :return: What the actor reads of it
        :raises ValueError: if a part is missing
        """
        if self._read_by_actor is None:
            return observation
        return select("actor", observation, (*self._read_by_actor, *self._not_read))

    # Only the actor

    def without_critic(self: SelfObservationKeys) -> SelfObservationKeys:
        """
        Copy the actor into a policy of the same class that has no critic, and whose observation space has nothing but what
        the actor reads. It acts (``predict``, ``get_distribution``), and can be saved and loaded; it estimates no values.

        :return: Policy with the current parameters of the actor
        """
        # Creating the networks must not change the random numbers of a training run.
        with th.random.fork_rng(devices=[]):
            actor = type(self)(**{**self._get_constructor_parameters(), **self._actor_arguments()})
        parameters = self.state_dict()
        actor.load_state_dict({name: parameters[_name_in_actor(name)] for name in actor.state_dict()})
        return actor.to(self.device).train(self.training)

    def _actor_arguments(self) -> Kwargs:
        """Arguments of the constructor with which there is no network of the critic."""
        keys, space = self._read_by_actor, self.observation_space
        # What the critic read may still be in the observations.
        given = None if self.actor_keys is None and self.critic_keys is None else list(keys or ())
        return {
            "observation_space": space if keys is None else select_space(space, (*keys, *self._not_read)),
            "actor_keys": given,
            "critic_keys": given,
            "with_critic": False,
            "share_features_extractor": True,
            "net_arch": {"pi": layers_of(self.net_arch, "pi"), "vf": []},
        }

    def _get_constructor_parameters(self) -> Kwargs:
        given: dict[str, object] = {name: keys for name in KEYWORDS if (keys := getattr(self, name)) is not None}
        if not self.with_critic:
            given["with_critic"] = False
        return {**super()._get_constructor_parameters(), **given}


class NoCritic(nn.Module):
    """Stands where the output layer of a critic would be."""

    def forward(self, latent_vf: th.Tensor) -> th.Tensor:
        """
        :param latent_vf: Not used
        :raises ValueError: always
        """
        raise BadArgumentError(
            "This policy is an actor without its critic, from `policy.without_critic()`: it has no values. Call `predict` or "
            "`get_distribution`, or the policy that it was made from."
        )


def select(reader: str, observation: object, keys: Iterable[str]) -> dict[str, Arrays]:
    """
    :param reader: Who reads the observation
    :param observation: Observation, or batch of observations
    :param keys: Keys of the parts to select
    :return: These parts, in the order of the keys
    :raises ValueError: if one is missing, or the observation is no dictionary
    """
    if not isinstance(observation, Mapping):
        raise BadArgumentError(
            f"The observation is {type(observation).__name__!r}, of which the {reader} reads {', '.join(map(repr, keys))}; "
            "give a dictionary with these keys."
        )
    if missing := [key for key in keys if key not in observation]:
        raise BadArgumentError(
            f"The observation has no {missing[0]!r}, which the {reader} reads: it has "
            f"{', '.join(map(repr, observation)) or 'no keys'}; give all keys that the {reader} reads."
        )
    return {key: observation[key] for key in keys}


def select_space(space: Any, keys: Iterable[str]) -> spaces.Dict:
    """
    :param space: Space of observations that are dictionaries
    :param keys: Keys of the parts to select
    :return: Space of these parts, in the order of the keys
    """
    # Gymnasium sorts other dictionaries.
    return spaces.Dict(OrderedDict((key, space[key]) for key in keys))


def check_keys(
    observation_space: spaces.Space, actor_keys: object, critic_keys: object, not_read: tuple[str, ...] = ()
) -> None:
    """
    :param observation_space: Observation space
    :param actor_keys: Keys of the observations that the actor reads, ``None`` for all
    :param critic_keys: Keys of the observations that the critic reads, ``None`` for all
    :param not_read: Keys that are no features
    :raises ValueError: if they are no keys of features in the space
    """
    for name, keys in zip(KEYWORDS, (actor_keys, critic_keys), strict=True):
        if keys is None:
            continue
        if not isinstance(observation_space, spaces.Dict):
            refuse(name, keys, f"the observation space is {observation_space}, only a `Dict` has keys; leave it out")
        known = [key for key in observation_space.spaces if key not in not_read]
        remedy = f"give a list with some of the keys of the observations: {', '.join(map(repr, known))}"
        if not isinstance(keys, list | tuple) or not keys:
            refuse(name, keys, f"{remedy}; or None for all")
        if unknown := [key for key in keys if key not in known]:
            refuse(name, keys, f"there is no {unknown[0]!r}; {remedy}")


def _name_in_actor(name: str) -> str:
    """Name of a parameter, or of the actor's where the critic may have one of its own."""
    return f"pi_{name.removeprefix('vf_')}" if name.startswith("vf_") else name


def _in_order(space: Any, keys: list[str] | None, not_read: tuple[str, ...]) -> Any:
    return tuple(key for key in space.spaces if key not in not_read and (keys is None or key in keys))
