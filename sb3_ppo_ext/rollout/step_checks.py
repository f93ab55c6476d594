"""Checks of the types and shapes of what a vectorised environment returns."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env.base_vec_env import VecEnvStepReturn

from sb3_ppo_ext.common.guards import EnvironmentDataError, check_finite
from sb3_ppo_ext.common.type_aliases import Arrays

# Kinds of dtypes that are numbers: floats, integers, Booleans. Complex ones would lose a part.
NUMBERS = "fiub"


class StepChecks:
    """
    Checks what a vectorised environment returns. Without them, NumPy would copy a single reward to all environments, add the
    value of a truncated episode to an integer, or fail far from the cause.

    :param model: Model that is trained in the environment
    :param step: Step of the rollout
    :param are_arrays: Whether the environment is known to return arrays of the right types and shapes
    """

    def __init__(self, model: OnPolicyAlgorithm, step: int = 0, are_arrays: bool = False):
        self.model, self.n_envs, self.step, self.are_arrays = model, model.n_envs, step, are_arrays
        # Signature of the last result that was right as it was
        self.accepted: object = None
        self.batch = (self.n_envs,)
        space: Any = model.observation_space
        self.is_dict = isinstance(space, spaces.Dict)
        # Shapes of single observations, and accepted shapes of those of all environments
        self.shapes = {key: part.shape for key, part in (space.items() if self.is_dict else [(None, space)])}
        self.batches = {key: self._batches(shape) for key, shape in self.shapes.items()}

    def _batches(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        # Discrete observations may be a column.
        return ((*self.batch, *shape),) if shape else (self.batch, (*self.batch, 1))

    def checked(self, result: VecEnvStepReturn, step: int) -> VecEnvStepReturn:
        """
        :param result: Result of ``env.step``
        :param step: Step of the rollout
        :return: Observations, rewards as an array of floats, dones as an array of Booleans, and infos
        :raises EnvironmentDataError: if the result is not of the types and shapes that a ``VecEnv`` returns, or if numbers in
            it are not finite
        """
        if not self.are_arrays:
            result = self._of_right_types(result, step)
        check_finite(self.model, "observation", result[0], step)
        check_finite(self.model, "reward", result[1], step)
        return result

    def _of_right_types(self, result: VecEnvStepReturn, step: int) -> VecEnvStepReturn:
        # One comparison at each step; it fails in one way or another for all that is not like a step that was examined.
        try:
            signature = _signature(*result)
            if signature == self.accepted:
                return result
        except (AttributeError, TypeError):
            signature = None
        self.step = step
        examined = self._examined(result)
        if all(one is other for one, other in zip(examined, result, strict=True)):
            self.accepted = signature
        return examined

    def _examined(self, result: VecEnvStepReturn) -> VecEnvStepReturn:
        if not isinstance(result, tuple) or len(result) != 4:
            self._refuse("result of `step`", "a tuple of observations, rewards, dones and infos", result)
        observations, rewards, dones, infos = result
        self.check_observations(observations)
        dones = self._as_dones(dones)
        if isinstance(infos, list | tuple | np.ndarray) and len(infos) == 0 and not dones.any():
            infos = [{} for _ in range(self.n_envs)]  # SB3 reads them only where an episode has ended.
        if not isinstance(infos, list | tuple | np.ndarray) or len(infos) != self.n_envs:
            self._refuse_infos(infos)
        return observations, self._as_rewards(rewards), dones, infos

    def check_observations(self, observations: object) -> None:
        """
        :param observations: Observations of all environments
        :raises EnvironmentDataError: if they are not arrays of numbers, of shape ``(n_envs, *obs_shape)``
        """
        parts = self._parts("observations", observations)
        for key, shapes in self.batches.items():
            part = parts[key]
            if not isinstance(part, np.ndarray) or part.shape not in shapes or part.dtype.kind not in NUMBERS:
                self._refuse(_named("observations", key), f"an array of numbers, of shape {shapes[0]}", part)

    def check_infos(self, infos: Any) -> None:
        """
        :param infos: Infos of all environments
        :raises EnvironmentDataError: if one is not a dictionary
        """
        if not all(isinstance(info, Mapping) for info in infos):
            self._refuse_infos(infos)

    def checked_terminal(self, observation: object) -> object:
        """
        :param observation: Terminal observation of an environment, which may be a batch of one
        :return: The observation, of shape ``obs_shape``
        :raises EnvironmentDataError: if it is not of the type and shape of a single observation
        """
        parts = self._parts("terminal observation", observation)
        single = {key: self._single(key, parts[key], shape) for key, shape in self.shapes.items()}
        return single if self.is_dict else single[None]

    def _single(self, key: object, part: object, shape: tuple[int, ...]) -> np.ndarray:
        array = _as_array(part)
        if array is None or array.dtype.kind not in NUMBERS or array.shape not in (shape, (1, *shape)):
            self._refuse(_named("terminal observation", key), f"numbers of shape {shape}", part)
        return array.reshape(shape)

    def _parts(self, what: str, observations: object) -> Mapping[object, object]:
        if not self.is_dict:
            return {None: observations}
        if not isinstance(observations, Mapping) or observations.keys() != self.shapes.keys():
            self._refuse(what, f"a dictionary with the keys {list(self.shapes)}", observations)
        return observations

    def _as_rewards(self, rewards: object) -> np.ndarray:
        array = _as_array(rewards)
        if array is None or array.shape != self.batch or array.dtype.kind not in NUMBERS:
            self._refuse("rewards", f"an array of numbers, of shape {self.batch}", rewards)
        # The value of a truncated episode is added to its last reward: added to an integer, it would lose its decimals.
        array = array if array.dtype.kind == "f" else array.astype(np.float32)
        return array if array.flags.writeable else array.copy()

    def _as_dones(self, dones: object) -> np.ndarray:
        array = _as_array(dones)
        if array is None or array.shape != self.batch or array.dtype.kind not in NUMBERS or not np.isin(array, (0, 1)).all():
            self._refuse("dones", f"an array of Booleans, or of 0 and 1, of shape {self.batch}", dones)
        return array if array.dtype.kind == "b" else array.astype(bool)

    def _refuse_infos(self, infos: object) -> NoReturn:
        self._refuse("infos", f"a list of {self.n_envs} dictionaries", infos)

    def _refuse(self, what: str, expected: str, value: object) -> NoReturn:
        raise EnvironmentDataError(
            f"The {what} of the environment must be {expected}, not {_described(value)}: at step {self.step} of the rollout,"
            f" after {self.model.num_timesteps} timesteps. Nothing was learned from this rollout."
        )


def _signature(observations: Arrays, rewards: Arrays, dones: Arrays, infos: Any) -> tuple[Any, ...]:
    kinds = (observations.dtype, rewards.dtype, rewards.flags.writeable, dones.dtype, type(infos))
    return observations.shape, rewards.shape, dones.shape, len(infos), kinds


def _as_array(value: object) -> np.ndarray | None:
    """The value as an array, objects that are numbers as numbers; ``None`` if that is not possible."""
    try:
        array = np.asarray(value)
        return array.astype(np.float64) if array.dtype.kind == "O" else array
    except (TypeError, ValueError):
        return None


def _named(what: str, key: object) -> str:
    return what if key is None else f"{what} {key!r}"


def _described(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}, of shape {value.shape}"
    if isinstance(value, Mapping):
        return f"a dictionary with the keys {list(value)}"
    return f"{reprlib.repr(value)} ({type(value).__name__})"
