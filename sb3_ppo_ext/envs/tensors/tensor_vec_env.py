"""Vectorised environments whose observations, rewards and ends of episodes are tensors on one device."""

from __future__ import annotations

import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from sb3_ppo_ext.common.hybrid_actions import FlatActionSpace, sample_space
from sb3_ppo_ext.common.observations import dtype_of, map_observations
from sb3_ppo_ext.common.type_aliases import Arrays, Info
from sb3_ppo_ext.common.validation import check_number, check_type, refuse
from sb3_ppo_ext.envs.tensors.env_log import EnvLog
from sb3_ppo_ext.envs.tensors.tensor_spaces import check_tensor, check_tensors, map_tensors

TensorObs: TypeAlias = "th.Tensor | dict[str, th.Tensor]"
_NOT_FILLED = th.empty(0)


class TensorStep(NamedTuple):
    """
    What one step of all environments returns. All tensors are on the device of the environment, which may overwrite them in
    its next step.

    :param observations: Observations, shape ``(n_envs, *obs_shape)``; the first ones of the next episode where one has ended
    :param rewards: Rewards in float32, shape ``(n_envs,)``
    :param terminated: Whether an episode has ended in a terminal state, bool, shape ``(n_envs,)``
    :param truncated: Whether an episode was cut off, bool, shape ``(n_envs,)``
    :param final_observations: Last observations of the episodes that have ended, shape ``(n_envs, *obs_shape)``; the other
        rows mean nothing. ``None`` if the environment does not give them
    :param log: What the environment wants logged: scalars, of which the mean over the steps is logged, or tensors of shape
        ``(n_envs,)``, of which that over the ends of episodes is
    :param episode_returns: Sums of the rewards of the running episodes, including this step, in float32, shape ``(n_envs,)``.
        :meth:`TensorVecEnv.step_tensors` fills them in
    :param episode_lengths: Number of steps of the running episodes, including this one, in int64, shape ``(n_envs,)``.
        :meth:`TensorVecEnv.step_tensors` fills them in
    """

    observations: TensorObs
    rewards: th.Tensor
    terminated: th.Tensor
    truncated: th.Tensor
    final_observations: TensorObs | None = None
    log: Mapping[str, th.Tensor] = MappingProxyType({})
    episode_returns: th.Tensor = _NOT_FILLED
    episode_lengths: th.Tensor = _NOT_FILLED


class TensorVecEnv(VecEnv, ABC):
    """
    A ``VecEnv`` of SB3 that can also be stepped in tensors, with :meth:`reset_tensors` and :meth:`step_tensors`, without
    copies to the host and without waiting for the device. Subclasses write ``_reset`` and ``_step``.

    With SB3's own methods, the infos of environments whose episode has ended have the keys of SB3's ``Monitor`` and
    ``DummyVecEnv`` (``episode``, ``terminal_observation``, ``TimeLimit.truncated``) and the entries of the log. All others are
    empty.

    :param num_envs: Number of environments
    :param observation_space: Observation space of one environment. Observations have its dtype, float32 instead of float64
    :param action_space: Action space of one environment. Actions have its dtype, float32 instead of float64; discrete ones
        are int64 of shape ``(n_envs,)``. Those of a ``Dict`` or ``Tuple`` are dictionaries or tuples of tensors
    :param device: Device of all tensors
    :raises ValueError: if an argument is not valid
    """

    #: Render mode of all environments, ``None`` without images
    render_mode: str | None = None

    def __init__(
        self,
        num_envs: int,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        device: th.device | str = "cpu",
    ):
        check_number("num_envs", num_envs, 1, integer=True)
        for name, space in (("observation_space", observation_space), ("action_space", action_space)):
            check_type(name, space, spaces.Space, "give a space of `gymnasium.spaces`, that of one environment")
        super().__init__(num_envs, observation_space, action_space)
        self._returns = th.zeros(num_envs, device=device)
        # With its index: another GPU may be the current one later.
        self.device = self._returns.device
        self._lengths = th.zeros(num_envs, dtype=th.int64, device=self.device)
        self._is_checked = self._has_warned = self._has_warned_of_graph = False
        self.actions: object = None
        self._last_observations: Arrays = None
        #: What :meth:`step_wait` returned for the log since the last rollout. Steps in tensors leave it to who takes them
        self.env_log = EnvLog()
        self._start = time.time()

    @abstractmethod
    def _reset(self, seed: int | None) -> TensorObs:
        """
        Begin new episodes in all environments.

        :param seed: Seed of all random numbers, ``None`` to continue with the present ones
        :return: First observations, shape ``(n_envs, *obs_shape)``
        """

    @abstractmethod
    def _step(self, actions: object) -> TensorStep:
        """
        Step all environments, and begin new episodes where one has ended. It must not wait for the device.

        :param actions: Actions, shape ``(n_envs, *action_shape)``; a dictionary or tuple of tensors if the action space is a
            ``Dict`` or ``Tuple``
        :return: The step, without ``episode_returns`` and ``episode_lengths``
        """

    def reset_tensors(self) -> TensorObs:
        """
        Begin new episodes in all environments.

        :return: First observations, shape ``(n_envs, *obs_shape)``
        """
        observations = self._reset(self._seeds[0])
        check_tensors("observations", observations, self.observation_space, self.num_envs, self.device)
        if _has_graph(observations):
            observations = self._without_graph(observations)
        self._reset_seeds()
        self._reset_options()
        self._returns.zero_()
        self._lengths.zero_()
        return observations

    def step_tensors(self, actions: th.Tensor) -> TensorStep:
        """
        Step all environments, and begin new episodes where one has ended, without waiting for the device. What the
        environment returns is checked in the first step.

        :param actions: Actions on the device of the environment, shape ``(n_envs, *action_shape)``; a dictionary or tuple of
            tensors if the action space is a ``Dict`` or ``Tuple``
        :return: The step
        :raises ValueError: if a tensor of the first step has another shape, dtype or device than it must have
        """
        if not self._is_checked:
            check_tensors("actions", actions, self.action_space, self.num_envs, self.device)
        step = self._step(actions)
        if not self._is_checked:
            self._check(step)
            self._is_checked = True
        if any(map(_has_graph, (step.observations, step.rewards, step.final_observations, step.log))):
            step = TensorStep(*map(self._without_graph, step))
        # In place, so that a captured graph can be replayed
        self._returns.add_(step.rewards)
        self._lengths.add_(1)
        step = step._replace(episode_returns=self._returns.clone(), episode_lengths=self._lengths.clone())
        ended = step.terminated | step.truncated
        self._returns.masked_fill_(ended, 0)
        self._lengths.masked_fill_(ended, 0)
        return step

    def _without_graph(self, tensors: Arrays) -> Arrays:
        """The tensors without their graph of autograd: no gradient of PPO goes through an environment."""
        if not self._has_warned_of_graph:
            self._has_warned_of_graph = True
            warnings.warn(
                "The environment returns tensors with a graph of autograd, which are detached. If its state keeps the graph, "
                "the graph grows with each step: let it detach its state, or compute its step under `torch.no_grad()`.",
                stacklevel=4,
            )
        return tensors if tensors is None else map_observations(th.Tensor.detach, tensors)

    def _check(self, step: TensorStep) -> None:
        check_type("step", step, TensorStep, "return a `TensorStep`")
        check_tensors("observations", step.observations, self.observation_space, self.num_envs, self.device)
        if step.final_observations is not None:
            final = step.final_observations
            check_tensors("final_observations", final, self.observation_space, self.num_envs, self.device)
        for name, dtype in (("rewards", th.float32), ("terminated", th.bool), ("truncated", th.bool)):
            check_tensor(name, getattr(step, name), (self.num_envs,), dtype, self.device)
        for key, values in step.log.items():
            if not isinstance(values, th.Tensor) or values.shape not in ((), (self.num_envs,)):
                refuse(f"log[{key!r}]", values, f"give a tensor without dimensions, or of shape ({self.num_envs},)")

    def reset(self) -> VecEnvObs:
        """
        Begin new episodes in all environments.

        :return: First observations in NumPy, shape ``(n_envs, *obs_shape)``
        """
        return self.reset_to_numpy(self.reset_tensors())

    def reset_to_numpy(self, observations: TensorObs) -> VecEnvObs:
        """
        :param observations: What :meth:`reset_tensors` has returned, as a wrapper may have changed it
        :return: What :meth:`reset` returns
        """
        self.reset_infos = [{} for _ in range(self.num_envs)]
        self._last_observations = map_tensors(observations, _copied_to_host)
        return self._last_observations

    def step_async(self, actions: object) -> None:
        """
        :param actions: Actions of the next :meth:`step_wait`, shape ``(n_envs, *action_shape)``, or a list of dictionaries or
            tuples if the action space is a ``Dict`` or ``Tuple``
        """
        self.actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        """
        Step all environments with the actions of :meth:`step_async`.

        :return: Observations, rewards and ends of episodes in NumPy, and the infos
        """
        return self.step_to_numpy(self.step_tensors(self.pending_actions()))

    def pending_actions(self) -> th.Tensor:
        """
        :return: Actions that :meth:`step_async` was given, on the device, shape ``(n_envs, *action_shape)``; in a dictionary
            or tuple if the action space is a ``Dict`` or ``Tuple``
        """
        space = sample_space(self.action_space)
        if isinstance(space, FlatActionSpace):
            return space.batched(th.from_numpy(space.flattened(self.actions)).to(self.device))
        shape = (self.num_envs, *(space.shape or ()))
        actions = th.as_tensor(np.asarray(self.actions), dtype=dtype_of(space))
        return actions.reshape(shape).to(self.device)

    def step_to_numpy(self, step: TensorStep) -> VecEnvStepReturn:
        """
        :param step: What :meth:`step_tensors` has returned, as a wrapper may have changed it
        :return: What :meth:`step_wait` returns
        """
        numbers = _numbers_on_host(step)
        rewards, terminated, truncated, _, _ = numbers
        self.env_log.add(step.log, step.terminated | step.truncated)
        infos = self._infos(step, numbers, self._last_observations)
        observations = map_tensors(step.observations, _copied_to_host)
        self._last_observations = observations
        return observations, rewards, terminated | truncated, infos

    def infos(self, step: TensorStep, seen: TensorObs) -> list[Info]:
        """
        :param step: Step that :meth:`step_tensors` has just returned
        :param seen: Observations before the step, shape ``(n_envs, *obs_shape)``
        :return: Infos of the step, as :meth:`step_wait` returns them
        """
        last_seen = map_tensors(seen, _copied_to_host) if step.final_observations is None else None
        return self._infos(step, _numbers_on_host(step), last_seen)

    def _infos(self, step: TensorStep, numbers: tuple[np.ndarray, ...], seen: TensorObs | None) -> list[dict[str, object]]:
        _, terminated, truncated, returns, lengths = numbers
        dones = terminated | truncated
        infos: list[dict[str, object]] = [{} for _ in range(self.num_envs)]
        ended = np.flatnonzero(dones)
        if len(ended):
            self.fill_infos(infos, ended, step, (truncated & ~terminated)[ended], returns[ended], lengths[ended], seen)
            for index in ended.tolist():
                self.reset_infos[index] = {}
        return infos

    def fill_infos(
        self,
        infos: list[Info] | dict[int, Info],
        ended: np.ndarray,
        step: TensorStep,
        cut_off: np.ndarray,
        returns: np.ndarray,
        lengths: np.ndarray,
        seen: Arrays,
    ) -> None:
        """
        Write what belongs to the end of an episode into infos.

        :param infos: Infos, to write into
        :param ended: Their indices, and those of the rows of the step, of the episodes that have ended
        :param step: Step of the environments
        :param cut_off: Whether each of these episodes was truncated
        :param returns: Their returns
        :param lengths: Their lengths
        :param seen: Observations before the step, in the place of last ones that the step does not have
        """
        seconds = self.seconds()
        last = _rows(self._final_rows(step, ended, seen), len(ended))
        logs = _log_rows(step.log, ended)
        numbers = (ended.tolist(), last, cut_off.tolist(), returns.tolist(), lengths.tolist(), logs)
        for index, observation, truncated, total, length, log in zip(*numbers, strict=True):
            info = infos[index]
            info.update(log)
            info["terminal_observation"] = observation
            info["TimeLimit.truncated"] = truncated
            info["episode"] = {"r": total, "l": int(length), "t": seconds}

    def seconds(self) -> float:
        """:return: Seconds since the environment was created, as in the infos of SB3's ``Monitor``"""
        return round(time.time() - self._start, 6)

    def _final_rows(self, step: TensorStep, ended: np.ndarray, seen: TensorObs) -> Arrays:
        """Last observations of the episodes that have ended, shape ``(n_ended, *obs_shape)``."""
        if step.final_observations is not None:
            rows = th.from_numpy(ended).to(self.device)
            return map_tensors(step.final_observations, lambda part: part.index_select(0, rows).cpu().numpy())
        self.warn_without_final_observations()
        return map_tensors(seen, lambda part: part[ended])

    def warn_without_final_observations(self) -> None:
        """Warn once that the last observations of episodes are not known."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "The environment does not give the last observations of episodes: the last one that was seen, a step earlier, "
                "stands in for them. Episodes that were cut off are valued there.",
                stacklevel=4,
            )

    def close(self) -> None:
        """Release what the environment holds."""

    def _owner(self, name: str) -> object:
        """Object whose attribute or method of this name :meth:`get_attr` and the like read, write or call."""
        return self

    def _images(self) -> object:
        """Images of all environments, shape ``(n_envs, height, width, 3)``, or one image, or ``None``."""
        return None

    def get_images(self) -> Sequence[np.ndarray | None]:
        """
        :return: Images of the environments; as many as the environment draws
        """
        images = self._images()
        if images is None:
            return [None] * self.num_envs
        array = images.cpu().numpy() if isinstance(images, th.Tensor) else np.asarray(images)
        return [array] if array.ndim == 3 else list(array)

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """
        :param attr_name: Name of an attribute of the environment as a whole
        :param indices: Indices of environments
        :return: Its value, once for each index
        """
        value = getattr(self._owner(attr_name), attr_name)
        return [value for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: object, indices: VecEnvIndices = None) -> None:
        """
        :param attr_name: Name of an attribute of the environment as a whole
        :param value: Its new value
        :param indices: Indices of environments, which must be all of them
        :raises ValueError: if they are only some of them
        """
        if set(self._get_indices(indices)) != set(range(self.num_envs)):
            refuse("indices", indices, "all environments have their attributes in common; give None")
        setattr(self._owner(attr_name), attr_name, value)

    def env_method(
        self, method_name: str, *method_args: object, indices: VecEnvIndices = None, **method_kwargs: object
    ) -> list[object]:
        """
        :param method_name: Name of a method of the environment as a whole, which is called once
        :param method_args: Its positional arguments
        :param indices: Indices of environments
        :param method_kwargs: Its keyword arguments
        :return: What it returns, once for each index
        """
        value = getattr(self._owner(method_name), method_name)(*method_args, **method_kwargs)
        return [value for _ in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: VecEnvIndices = None) -> list[bool]:
        """
        :param wrapper_class: Class of wrappers
        :param indices: Indices of environments
        :return: Whether they are wrapped in it; true for SB3's ``Monitor``, because the infos have what it writes
        """
        return [wrapper_class is Monitor for _ in self._get_indices(indices)]


def changed_step(env: VecEnv, known: object) -> str | None:
    """
    :param env: Environment
    :param known: Class of this package from which it is derived
    :return: Name of a method of SB3 that a subclass or a script has replaced, and which a step in tensors does not call
    """
    names = ("reset", "step", "step_async", "step_wait")
    return next((name for name in names if getattr(type(env), name) is not getattr(known, name) or name in vars(env)), None)


def _has_graph(tensors: Arrays) -> bool:
    parts = tensors.values() if isinstance(tensors, Mapping) else (tensors,)
    return any(part is not None and part.requires_grad for part in parts)


def _copied_to_host(tensor: th.Tensor) -> np.ndarray:
    # A view of the tensor would be overwritten by the next step.
    return np.array(tensor.cpu().numpy())


def _numbers_on_host(step: TensorStep) -> tuple[np.ndarray, ...]:
    """Rewards, terminated, truncated, returns and lengths in NumPy, by one transfer."""
    parts = (step.rewards, step.terminated, step.truncated, step.episode_returns, step.episode_lengths)
    if step.rewards.device.type == "cpu":
        rewards, terminated, truncated, returns, lengths = (part.numpy() for part in parts)
        return rewards.copy(), terminated, truncated, returns, lengths
    rewards, terminated, truncated, returns, lengths = th.stack([part.to(th.float64) for part in parts]).cpu().numpy()
    return rewards.astype(np.float32), terminated != 0, truncated != 0, returns, lengths


def _rows(arrays: Arrays, n_rows: int) -> list[Arrays]:
    """Rows of an array, or dictionaries of the rows of the arrays in a dictionary."""
    if isinstance(arrays, dict):
        return [{key: part[row] for key, part in arrays.items()} for row in range(n_rows)]
    return list(arrays)


def _log_rows(log: Mapping[str, th.Tensor], ended: np.ndarray) -> list[dict[str, object]]:
    """Entries of the log for each of the environments whose episode has ended."""
    rows = {}
    for key, tensor in log.items():
        values = tensor.detach().cpu().numpy()
        rows[key] = (values[ended] if values.ndim else np.repeat(values, len(ended))).tolist()
    return [{key: values[row] for key, values in rows.items()} for row in range(len(ended))]
