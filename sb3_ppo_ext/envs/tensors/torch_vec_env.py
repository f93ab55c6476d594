"""Environments in PyTorch, such as those of ManiSkill, Isaac Lab, mjlab and rsl_rl, as a ``TensorVecEnv``."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from sb3_ppo_ext.common.type_aliases import Arrays, Info
from sb3_ppo_ext.common.validation import check_observation_space, check_type, refuse
from sb3_ppo_ext.envs.tensors.tensor_spaces import as_gymnasium, in_dtype_of, map_tensors
from sb3_ppo_ext.envs.tensors.tensor_vec_env import TensorObs, TensorStep, TensorVecEnv

#: Keys of the last observations in the infos: of Gymnasium and Isaac Lab, of ManiSkill
FINAL_KEYS = ("final_obs", "final_observation")
#: Keys of the last observation, and of whether the episode was cut off, in the infos of one copy
LAST_KEYS, TIME_OUT_KEYS = (*FINAL_KEYS, "terminal_observation"), ("TimeLimit.truncated", "time_outs")


class TorchVecEnv(TensorVecEnv):
    """
    Adapter for environments that are vectorised in PyTorch::

        env = TorchVecEnv(ManiSkillVectorEnv(gym.make("PickCube-v1", num_envs=1024)))
        env = TorchVecEnv(gym.make("Isaac-Cartpole-v0", cfg=cfg), keys="policy", action_space=spaces.Box(-1, 1, (1,)))
        env = TorchVecEnv(ManagerBasedRlEnv(cfg, device="cuda"), keys="actor", action_space=spaces.Box(-1, 1, (12,)))  # mjlab

    The environment steps all its copies at once, and begins new episodes by itself. Its ``step(actions)`` returns tensors:
    either ``observations, rewards, terminated, truncated, infos``, as in Gymnasium, or ``observations, rewards, dones,
    extras`` with the episodes that were cut off in ``extras["time_outs"]``, as in rsl_rl. Without these, all of them count as
    terminated. Its ``reset`` may take ``seed`` and ``options`` and return infos as well; ``get_observations`` stands in for it
    where there is none.

    Last observations are taken from the infos, ``"final_obs"`` or ``"final_observation"``, and the log from ``"log"`` or
    ``"episode"``; ``"success"`` becomes ``is_success``. Infos may also be a list with a dictionary for each copy, as in SB3:
    ``"TimeLimit.truncated"`` and ``"terminal_observation"`` are then read as well. If the ``cfg`` of the environment says
    ``is_finite_horizon``, as in Isaac Lab, episodes that run out of time are terminated.

    :param env: Environment
    :param num_envs: Number of copies, by default ``env.num_envs``
    :param observation_space: Observation space of one copy, by default ``env.single_observation_space``
    :param action_space: Action space of one copy, by default ``env.single_action_space``. Those of Isaac Lab and mjlab have no
        bounds, which no policy accepts: give the ones that the actions shall have
    :param device: Device of the tensors, by default ``env.device``
    :param keys: Key of the observations that are used if they are a dictionary, or a list of keys. By default all
    :param final_observations: Whether the environment gives the last observations of episodes. By default it is found out: by
        ``cfg.compute_final_obs``, or as soon as the first ones are given
    :raises ValueError: if an argument is not valid, or is needed because ``env`` does not say it
    """

    def __init__(
        self,
        env: Any,
        num_envs: int | None = None,
        observation_space: spaces.Space | None = None,
        action_space: spaces.Space | None = None,
        device: th.device | str | None = None,
        keys: str | Sequence[str] | None = None,
        final_observations: bool | None = None,
    ):
        _check_environment(env)
        self.env = env
        self.keys = keys
        observation_space = _given_space(env, "observation_space", observation_space)
        observation_space = _selected_space(observation_space, keys)
        check_observation_space(observation_space)
        super().__init__(
            _given(env, "num_envs", num_envs, "num_envs"),
            observation_space,
            _given_space(env, "action_space", action_space),
            _given(env, "device", device, "device"),
        )
        cfg = _read(env, "cfg")
        self._ends_by_time = bool(getattr(cfg, "is_finite_horizon", False))
        self._gives_final = getattr(cfg, "compute_final_obs", None) if final_observations is None else final_observations

    def _reset(self, seed: int | None) -> TensorObs:
        reset = getattr(self.env, "reset", None)
        if reset is None:
            result = self.env.get_observations()
        else:
            known = inspect.signature(reset).parameters
            takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
            given = {"seed": seed, "options": self._options[0] or None}
            result = reset(**{name: value for name, value in given.items() if takes_any or name in known})
        return self._selected(result[0] if isinstance(result, tuple) else result)

    def _step(self, actions: object) -> TensorStep:
        results = self.env.step(actions)
        if len(results) == 4:
            observations, rewards, dones, infos = results
            infos, dones = self._joined(infos), dones.to(th.bool)
            # Some environments write `time_outs` only at a reset, so that those of others are old.
            time_outs = infos.get("time_outs")
            truncated = th.zeros_like(dones) if time_outs is None else time_outs.to(th.bool) & dones
            terminated = dones & ~truncated
        else:
            observations, rewards, terminated, truncated, infos = results
            infos = self._joined(infos)
        if self._ends_by_time:
            terminated, truncated = terminated | truncated, th.zeros_like(truncated)
        observations = self._selected(observations)
        return TensorStep(
            observations,
            rewards.to(th.float32),
            terminated.to(th.bool),
            truncated.to(th.bool),
            self._final(observations, infos),
            self._log(infos),
        )

    def _joined(self, infos: object) -> Arrays:
        """The infos as one dictionary, where they are a list of the dictionaries of all copies."""
        if not isinstance(infos, list | tuple):
            return infos
        if len(infos) not in (0, self.num_envs) or not all(isinstance(info, dict) for info in infos):
            refuse("infos", infos, f"give one dictionary of tensors, or a list of {self.num_envs} dictionaries")
        if not infos:
            return {}
        time_outs = [bool(_first(info, TIME_OUT_KEYS) or False) for info in infos]
        joined: dict[str, object] = {"time_outs": th.tensor(time_outs, device=self.device)}
        if all("success" in info or "is_success" in info for info in infos):
            joined["success"] = self._stacked(*(_first(info, ("success", "is_success")) for info in infos))
        last = [_first(info, LAST_KEYS) for info in infos]
        if any(given := [each is not None for each in last]):
            # The other rows mean nothing.
            filled = [each if each is not None else last[given.index(True)] for each in last]
            joined[FINAL_KEYS[0]] = map_tensors(filled[0], self._stacked, *filled[1:])
        return joined

    def _stacked(self, *rows: th.Tensor) -> th.Tensor:
        return th.stack([th.as_tensor(row, device=self.device) for row in rows])

    def _selected(self, observations: Arrays) -> TensorObs:
        """The observations that are used, in the dtypes of their spaces."""
        if isinstance(self.keys, str):
            observations = observations[self.keys]
        space = self.observation_space
        if isinstance(space, spaces.Dict):
            return {key: _cast(observations[key], part) for key, part in space.spaces.items()}
        return _cast(observations, space)

    def _final(self, observations: TensorObs, infos: Info) -> TensorObs | None:
        if self._gives_final is False:
            return None
        for key in FINAL_KEYS:
            if infos.get(key) is not None:
                self._gives_final = True
                return self._selected(infos[key])
        # They are given only in steps in which an episode has ended.
        return observations if self._gives_final else None

    def _log(self, infos: Info) -> dict[str, th.Tensor]:
        ended = infos.get("final_info", infos)
        log: dict[str, th.Tensor] = {}
        for values in (ended.get("log"), ended.get("episode"), {"is_success": ended.get("success")}):
            for key, value in (values or {}).items():
                if isinstance(value, int | float):
                    # Made on the device, without a transfer
                    value = th.full((), float(value), device=self.device)
                if isinstance(value, th.Tensor) and value.shape in ((), (self.num_envs,)):
                    log[key] = value
        return log

    def _owner(self, name: str) -> object:
        for each in (self.env, getattr(self.env, "unwrapped", None)):
            if hasattr(each, name):
                return each
        return self

    def _images(self) -> np.ndarray | None:
        return self.env.render()

    def close(self) -> None:
        """Close the environment."""
        if hasattr(self.env, "close"):
            self.env.close()


def _check_environment(env: object) -> None:
    remedy = "give an environment in PyTorch with a method `step`, and `reset` or `get_observations`"
    if isinstance(env, type) or not hasattr(env, "step") or not (hasattr(env, "reset") or hasattr(env, "get_observations")):
        refuse("env", env, remedy)
    metadata = _read(env, "metadata")
    mode = metadata.get("autoreset_mode") if isinstance(metadata, dict) else None
    by_itself = (_read(env, "auto_reset"), getattr(_read(env, "cfg"), "auto_reset", None))  # of ManiSkill, of mjlab
    if mode not in (None, AutoresetMode.SAME_STEP, AutoresetMode.SAME_STEP.value) or False in by_itself:
        refuse("env", env, "it does not begin new episodes in the step in which one ends; make it with that mode")


def _read(env: object, name: str) -> Any:
    """Attribute of the environment, or of the one inside of its wrappers, ``None`` if there is none."""
    value = getattr(env, name, None)
    return getattr(getattr(env, "unwrapped", None), name, None) if value is None else value


def _given(env: object, name: str, value: object, attribute: str) -> Any:
    value = _read(env, attribute) if value is None else value
    if value is None:
        refuse(name, value, f"the environment has no attribute `{attribute}`; give it as an argument")
    return value


def _given_space(env: object, name: str, space: object) -> spaces.Space:
    space = _given(env, name, space, f"single_{name}")
    if (made := as_gymnasium(space)) is None:
        refuse(name, space, "give a space of `gymnasium.spaces`, that of one copy")
    return made


def _selected_space(space: spaces.Space, keys: str | Sequence[str] | None) -> spaces.Space:
    if keys is None:
        return space
    check_type("keys", keys, (str, list, tuple), "give one key of the observations, or a list")
    known = list(space.spaces) if isinstance(space, spaces.Dict) else []
    names = [keys] if isinstance(keys, str) else list(keys)
    if not isinstance(space, spaces.Dict) or not names or not set(names) <= set(known):
        refuse("keys", keys, f"give keys of the observations: {known}" if known else "the observations are no dictionary")
    return space[keys] if isinstance(keys, str) else spaces.Dict({key: space[key] for key in names})


def _cast(tensor: object, space: spaces.Space) -> Arrays:
    return in_dtype_of(space, tensor) if isinstance(tensor, th.Tensor) else tensor


def _first(info: Info, keys: Sequence[str]) -> Any:
    """The first of the entries that the info of a copy has, ``None`` without any."""
    return next((info[key] for key in keys if info.get(key) is not None), None)
