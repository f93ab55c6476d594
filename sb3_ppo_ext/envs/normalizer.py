"""Normalisation inside the model: the statistics and the arithmetic of ``VecNormalize`` without environments."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.type_aliases import PyTorchObs
from stable_baselines3.common.vec_env import VecNormalize
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs

from sb3_ppo_ext.common.action_masks import OBSERVATION
from sb3_ppo_ext.common.type_aliases import Arrays, JaxTree, StateDict
from sb3_ppo_ext.common.validation import check_type, refuse
from sb3_ppo_ext.envs.tensors.tensor_vec_normalize import TensorMeanStd

NormalizeFreq = Literal["step", "rollout"]
# As the default of `VecNormalize`
EPSILON = 1e-8


def normalized_keys(space: spaces.Space, normalize_obs: bool | list[str], unread: Collection[str] = ()) -> list[str] | None:
    """
    :param space: Observation space
    :param normalize_obs: Option of the model: ``True`` for all parts of the observations that can be normalised, or their keys
    :param unread: Keys of parts that are no observations, as masks
    :return: Keys of the parts to normalise, ``None`` if the observations are no dictionary
    :raises ValueError: if there is no such part, or it cannot be normalised
    """
    if not isinstance(space, spaces.Dict):
        if not isinstance(normalize_obs, bool):
            refuse("normalize_obs", normalize_obs, f"keys are for `Dict` observations, not for {space}; give True or False")
        if (reason := _why_not(space)) is not None:
            refuse("normalize_obs", normalize_obs, f"{reason}; give False")
        return None
    possible = [key for key, part in space.spaces.items() if key not in unread and _why_not(part) is None]
    if normalize_obs is True:
        if not possible:
            refuse("normalize_obs", normalize_obs, f"{space} has no part of numbers that can be normalised; give False")
        return possible
    for key in normalize_obs or ():
        if key not in space.spaces:
            refuse("normalize_obs", normalize_obs, f"there is no {key!r}: the keys are {', '.join(space.spaces)}")
        if key in unread:
            refuse("normalize_obs", normalize_obs, f"{key!r} has the masks of the actions; give {possible}")
        if (reason := _why_not(space[key])) is not None:
            refuse("normalize_obs", normalize_obs, f"{key!r}: {reason}; give {possible}")
    return list(normalize_obs or ())


def _why_not(space: spaces.Space) -> str | None:
    if not isinstance(space, spaces.Box):
        return f"observations in {space} are no numbers on a scale"
    return f"observations in {space} are images, which the policy divides by 255" if is_image_space(space) else None


class Normalizer:
    """
    Running statistics of observations and discounted returns, with which a model normalises what it reads of its environments.
    Attributes and arithmetic are those of SB3's ``VecNormalize``, to the bit, or of :class:`TensorVecNormalize` where the
    environments step in tensors.

    :param shapes: Shapes of the parts of the observations to normalise by key, with the key ``""`` for observations that are
        no dictionary; empty if observations are not normalised
    :param norm_reward: Whether rewards are normalised
    :param clip_obs: Largest absolute value of a normalised observation
    :param clip_reward: Largest absolute value of a normalised reward
    :param by_rollout: Whether the statistics are those of earlier rollouts, except in the first one
    """

    #: Running statistics of the observations, or a dictionary of them; not set without `norm_obs`, as in `VecNormalize`
    obs_rms: Any
    #: Running statistics of the discounted returns
    ret_rms: Any

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        norm_reward: bool = False,
        clip_obs: float = 10.0,
        clip_reward: float = 10.0,
        by_rollout: bool = False,
    ):
        self.norm_obs, self.norm_reward = bool(shapes), norm_reward
        self.norm_obs_keys = None if shapes.keys() <= {""} else list(shapes)
        self.clip_obs, self.clip_reward, self.epsilon = clip_obs, clip_reward, EPSILON
        #: Whether the statistics are updated; set it to False to keep those of an earlier training
        self.training = True
        if shapes:
            made = {key: RunningMeanStd(shape=shape) for key, shape in shapes.items()}
            self.obs_rms = made[""] if self.norm_obs_keys is None else made
        self.ret_rms = RunningMeanStd(shape=())
        #: Discounted returns of the running episodes, shape ``(n_envs,)``
        self.returns: Arrays = None
        self.by_rollout, self._has_seen_rollout = by_rollout, False
        # Observations and returns of the steps of this rollout, if the statistics do not change in it
        self._rows: list[tuple[object, object]] = []

    @property
    def is_frozen(self) -> bool:
        """Whether the statistics stay as they are during a rollout."""
        return not self.training or (self.by_rollout and self._has_seen_rollout)

    # What changes the statistics

    def place(self, device: th.device | None) -> None:
        """
        Keep the statistics where the steps of the environments are.

        :param device: Device of environments that step in tensors, ``None`` for arrays
        """
        for _, container, key in self._places():
            is_there = isinstance(container[key], TensorMeanStd) == (device is not None)
            if not is_there or (device is not None and container[key]._mean.device != device):
                container[key] = container[key].copy() if device is None else TensorMeanStd(container[key], device)
        if self.returns is not None:
            returns = self.returns.cpu().numpy() if isinstance(self.returns, th.Tensor) else self.returns
            self.returns = returns if device is None else th.as_tensor(returns, dtype=th.float64, device=device)

    def reset(self, observations: Arrays) -> None:
        """
        Take part in a reset of all environments.

        :param observations: First observations of the episodes, shape ``(n_envs, *obs_shape)``
        """
        self.returns, self._rows = None, []
        if not self.is_frozen:
            self._update_observations(self.parts(observations))

    def step(self, observations: Arrays, rewards: Arrays, dones: Arrays, gamma: float) -> None:
        """
        Take part in a step of all environments.

        :param observations: Observations after the step as the environments returned them, shape ``(n_envs, *obs_shape)``
        :param rewards: Rewards, shape ``(n_envs,)``
        :param dones: Ends of episodes, shape ``(n_envs,)``
        :param gamma: Discount factor of the returns
        """
        if not self.training:
            if self.returns is not None:
                self.returns = _without(self.returns, dones)  # as `VecNormalize`
            return
        if self.returns is None:
            self.returns = _zeros_like(rewards)
        self.returns = self.returns * gamma + rewards
        if self.is_frozen:
            self._rows.append((_map(_copied, self.parts(observations)), _copied(self.returns)))
        else:
            self._update_observations(self.parts(observations))
            _update(self.ret_rms, self.returns)
        self.returns = _without(self.returns, dones)

    def begin_rollout(self) -> None:
        """Forget the steps of a rollout that was not finished."""
        self._rows = []

    def end_rollout(self) -> None:
        """Add the steps of the rollout, with which the model has been trained, to the statistics that did not change in it."""
        self._has_seen_rollout = True
        rows, self._rows = self._rows, []
        if rows:
            observations, returns = zip(*rows, strict=True)
            self._update_observations({key: _joined([each[key] for each in observations]) for key in observations[0]})
            _update(self.ret_rms, _joined(returns))

    def frozen(self) -> Normalizer:
        """
        :return: A copy of the statistics alone, which can be sent to other processes
        """
        return Normalizer.from_plain(self.plain())

    # What reads them

    def observations(self, observations: Arrays) -> Arrays:
        """
        :param observations: Observations as the environments return them, one or several, in arrays or tensors; parts of
            dictionaries may be missing
        :return: Observations as the policy reads them: normalised in float32, or as they were
        """
        parts = self.parts(observations)
        if not parts:
            return observations
        new = {key: self._normalize_obs(part, self._statistics(key)) for key, part in parts.items()}
        return {**observations, **new} if isinstance(observations, Mapping) else new[""]

    def scales(self) -> dict[str, tuple[np.ndarray, ...]]:
        """
        :return: For each part of the observations that is normalised, its mean as the sum of two numbers in float32, and its
            standard deviation, for :meth:`scaled`
        """
        found: dict[str, tuple[np.ndarray, ...]] = {}
        for key in self._keys():
            statistics = self._statistics(key)
            mean, std = np.asarray(statistics.mean), np.sqrt(statistics.var + self.epsilon)
            high = mean.astype(np.float32)
            found[key] = high, (mean - high).astype(np.float32), std.astype(np.float32)
        return found

    def scaled(self, observations: JaxTree, scales: JaxTree) -> JaxTree:
        """
        :param observations: Observations in JAX
        :param scales: What :meth:`scales` returns
        :return: What :meth:`observations` returns, computed in float32
        """
        new = {}
        for key, part in self.parts(observations).items():
            high, low, std = scales[key]
            new[key] = ((part - high - low) / std).clip(-self.clip_obs, self.clip_obs)
        if not new:
            return observations
        return {**observations, **new} if isinstance(observations, Mapping) else new[""]

    def rewards(self, rewards: Arrays) -> Arrays:
        """
        :param rewards: Rewards as the environments return them, shape ``(n_envs,)``
        :return: A copy in float32, normalised if they are to be
        """
        if isinstance(rewards, th.Tensor):
            if not self.norm_reward:
                return rewards.to(th.float32, copy=True)
            return self.ret_rms.normalized(rewards, self.epsilon, self.clip_reward, centred=False)
        if self.norm_reward:
            scaled = rewards / np.sqrt(self.ret_rms.var + self.epsilon)
            rewards = np.minimum(np.maximum(scaled, -self.clip_reward), self.clip_reward)
        return rewards.astype(np.float32)

    def _normalize_obs(self, part: np.ndarray | th.Tensor, statistics: RunningMeanStd) -> Arrays:
        if isinstance(part, th.Tensor):
            if isinstance(statistics, TensorMeanStd) and statistics._mean.device == part.device:
                return statistics.normalized(part, self.epsilon, self.clip_obs)
            return th.as_tensor(self._normalize_obs(part.cpu().numpy(), statistics), device=part.device)
        scaled = (part - statistics.mean) / np.sqrt(statistics.var + self.epsilon)
        # As `np.clip`, which takes longer
        return np.minimum(np.maximum(scaled, -self.clip_obs), self.clip_obs).astype(np.float32)

    # Parts of the observations

    def _statistics(self, key: str) -> RunningMeanStd:
        return self.obs_rms[key] if self.norm_obs_keys is not None else self.obs_rms

    def parts(self, observations: VecEnvObs | PyTorchObs) -> dict[str, Arrays]:
        """
        :param observations: Observations
        :return: Parts that are normalised, by the keys of the result of :meth:`observations`, which are there
        """
        if not self.norm_obs:
            return {}
        if not isinstance(observations, Mapping):
            return {"": observations}
        keys = [OBSERVATION] if self.norm_obs_keys is None else self.norm_obs_keys  # The first beside masks
        return {key: observations[key] for key in keys if key in observations}

    def _update_observations(self, parts: Mapping[str, object]) -> None:
        for key, part in parts.items():
            _update(self._statistics(key), part)

    def _places(self) -> Iterator[tuple[str, Any, str]]:
        """Names of the statistics, and where they are: container and key."""
        if self.norm_obs_keys is not None:
            yield from ((f"obs_rms.{key}", self.obs_rms, key) for key in self.norm_obs_keys)
        elif self.norm_obs:
            yield "obs_rms", vars(self), "obs_rms"
        yield "ret_rms", vars(self), "ret_rms"

    # As plain data, and as `VecNormalize`

    def state_dict(self) -> StateDict:
        """
        :return: Statistics as lists of numbers, and whether they are updated
        """
        return {**{name: _as_lists(container[key]) for name, container, key in self._places()}, "training": self.training}

    def load_state_dict(self, state: StateDict, strict: bool = True) -> None:
        """
        :param state: What :meth:`state_dict` of a normalizer of the same observations has returned
        :param strict: For symmetry with PyTorch's modules
        """
        for name, container, key in self._places():
            saved, statistics = state[name], container[key]
            shape = np.shape(statistics.mean)
            statistics.mean = np.array(saved["mean"], np.float64).reshape(shape)
            statistics.var = np.array(saved["var"], np.float64).reshape(shape)
            statistics.count = float(saved["count"][0])
        self.training = bool(state.get("training", self.training))
        self._has_seen_rollout = float(self.ret_rms.count) >= 1

    def continue_from(self, before: Normalizer) -> None:
        """
        :param before: Normalizer of the same observations with other settings, whose episodes go on
        """
        self.load_state_dict(before.state_dict())
        self.returns, self._rows = before.returns, before._rows

    def plain(self) -> StateDict:
        """
        :return: Settings and statistics as plain data for :meth:`from_plain`
        """
        shapes = {key: list(np.shape(self._statistics(key).mean)) for key in self._keys()}
        settings = {name: getattr(self, name) for name in ("norm_reward", "clip_obs", "clip_reward", "by_rollout")}
        return {"shapes": shapes, "settings": settings, "statistics": self.state_dict()}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Normalizer:
        """
        :param plain: Result of :meth:`plain`
        :return: Normalizer with these settings and statistics
        """
        made = cls({key: tuple(shape) for key, shape in plain["shapes"].items()}, **plain["settings"])
        made.load_state_dict(plain["statistics"])
        return made

    def _keys(self) -> list[str]:
        return self.norm_obs_keys or ([""] if self.norm_obs else [])

    def take(self, name: str, source: Any) -> None:
        """
        Take in the statistics of a ``VecNormalize``.

        :param name: Name of the argument, for messages
        :param source: ``VecNormalize`` or :class:`TensorVecNormalize`
        :raises ValueError: if it has not the statistics that are needed, or others than numbers, or of another shape
        """
        check_type(name, source, VecNormalize, "give a `VecNormalize`, or the path of the file that it was saved to")
        theirs = source.obs_rms if self.norm_obs and source.norm_obs else None
        found = {f"obs_rms.{key}": theirs[key] for key in theirs} if isinstance(theirs, Mapping) else {"obs_rms": theirs}
        found["ret_rms"] = source.ret_rms
        for each, container, key in self._places():
            if found.get(each) is None:
                refuse(name, source, f"it has no statistics {each!r}, which `normalize_obs` of this model needs")
            _check_statistics(f"{name}.{each}", found[each], np.shape(container[key].mean))
        self.load_state_dict({each: _as_lists(found[each]) for each, *_ in self._places()})

    def give(self, target: VecNormalize) -> None:
        """
        :param target: ``VecNormalize`` for the same observations, which gets copies of the statistics
        """
        if self.norm_obs:
            target.obs_rms = self.obs_rms.copy() if self.norm_obs_keys is None else _map(RunningMeanStd.copy, self.obs_rms)
        target.ret_rms = self.ret_rms.copy()


def has_observations(state: object) -> bool:
    """
    :param state: What :meth:`Normalizer.state_dict` has returned, or something else
    :return: Whether it has statistics of observations
    """
    return isinstance(state, Mapping) and any(str(name).startswith("obs_rms") for name in state)


def _check_statistics(name: str, statistics: Any, shape: tuple[int, ...]) -> None:
    mean, var, count = (np.asarray(getattr(statistics, part)) for part in ("mean", "var", "count"))
    for part, value in (("mean", mean), ("var", var)):
        if value.shape != shape:
            refuse(f"{name}.{part}", f"of shape {value.shape}", f"the observations of this model have the shape {shape}")
        if not np.isfinite(value).all():
            refuse(f"{name}.{part}", value, "it has numbers that are not finite")
    if (var < 0).any() or not 0 < count < np.inf:
        refuse(name, statistics, f"variances and the count {count} cannot be negative or infinite")


def _as_lists(statistics: Any) -> dict[str, list[float]]:
    mean, var, count = statistics.mean, statistics.var, statistics.count
    return {name: np.ravel(part).astype(float).tolist() for name, part in dict(mean=mean, var=var, count=count).items()}


def _update(statistics: RunningMeanStd, rows: Arrays) -> None:
    if isinstance(statistics, TensorMeanStd):
        statistics.update_tensor(th.as_tensor(rows, device=statistics._mean.device))
    elif type(statistics) is RunningMeanStd and rows.dtype in (np.float32, np.float64):
        statistics.update_from_moments(*_moments(rows), len(rows))
    else:
        statistics.update(rows)


def _moments(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What ``np.mean`` and ``np.var`` return along the first axis, bit for bit, in a third of their time."""
    if len(rows) == 1:
        return rows[0], np.zeros_like(rows[0])
    mean = np.add.reduce(rows) / len(rows)
    deviations = rows - mean
    return mean, np.add.reduce(np.multiply(deviations, deviations, out=deviations)) / len(rows)


def _zeros_like(rewards: np.ndarray | th.Tensor) -> np.ndarray | th.Tensor:
    return th.zeros_like(rewards, dtype=th.float64) if isinstance(rewards, th.Tensor) else np.zeros(len(rewards))


def _without(returns: Arrays, dones: Arrays) -> Arrays:
    """Returns with zeros at the ends of episodes."""
    if isinstance(returns, th.Tensor):
        return returns.masked_fill_(dones, 0)  # An index of booleans would wait for the device.
    returns[dones] = 0
    return returns


def _map(function: Callable[..., object], parts: Mapping[str, Arrays]) -> dict[str, Arrays]:
    return {key: function(part) for key, part in parts.items()}


def _copied(part: Arrays) -> Arrays:
    return part.clone() if isinstance(part, th.Tensor) else np.array(part)


def _joined(parts: Arrays) -> Arrays:
    return th.cat(list(parts)) if isinstance(parts[0], th.Tensor) else np.concatenate(parts)
