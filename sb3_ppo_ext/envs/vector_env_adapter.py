"""Adapter from the vectorised environments of Gymnasium to those of SB3."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from sb3_ppo_ext.common.validation import refuse

PartialReset = Callable[[Any, np.ndarray], tuple[Any, dict[str, Any]]]


class VectorEnvAdapter(VecEnv):
    """
    Makes a vectorised environment of Gymnasium a ``VecEnv`` of SB3, for environments that step all copies in one call::

        env = VecMonitor(VectorEnvAdapter(gym.make_vec("CartPole-v1", num_envs=64, vectorization_mode="vector_entry_point")))

    SB3 requires the first observation of the next episode at the last step of an episode. The environment must either return
    it (``AutoresetMode.SAME_STEP``), or be able to reset some of its copies, as ``SyncVectorEnv``, ``AsyncVectorEnv``,
    Gymnasium's ``CartPoleVectorEnv`` and the environments of EnvPool are.

    If the environment takes one seed for each copy, the seeds are ``seed + index``, as in ``DummyVecEnv``.

    :param venv: Vectorised environment of Gymnasium
    :param partial_reset: Function that resets some copies, for environments that are not listed above. It takes the unwrapped
        environment and a mask of shape ``(n_envs,)``, resets the copies in the mask, and returns observations and infos as
        ``reset`` does; only those of the copies in the mask are used
    :raises ValueError: if ``venv`` is not a ``VectorEnv``, or cannot reset some of its copies
    """

    def __init__(self, venv: VectorEnv, partial_reset: PartialReset | None = None):
        self.venv = venv
        mode = _autoreset_mode(venv)
        self._partial_reset = None if mode == AutoresetMode.SAME_STEP else partial_reset or _find_partial_reset(venv)
        if mode != AutoresetMode.SAME_STEP and self._partial_reset is None:
            remedy = 'make it with `autoreset_mode="SameStep"`, or give a function as `partial_reset`'
            refuse("venv", venv, f"it cannot reset some of its copies (its mode is {mode}); {remedy}")
        super().__init__(venv.num_envs, venv.single_observation_space, venv.single_action_space)

    def reset(self) -> VecEnvObs:
        # Without a seed, Gymnasium keeps its random number generators.
        seeds: Any = self._seeds if any(seed is not None for seed in self._seeds) else None
        if seeds is not None and not _takes_seeds(self.venv):
            seeds = seeds[0]
        if any(options != self._options[0] for options in self._options):
            refuse("options", self._options, "Gymnasium's vectorised environments reset all copies with the same; give one")
        observations, infos = self.venv.reset(seed=seeds, options=self._options[0] or None)
        self.reset_infos = self._split(infos)
        self._reset_seeds()
        self._reset_options()
        return _copied(observations)

    def step_async(self, actions: Any) -> None:
        space = self.action_space
        if isinstance(space, spaces.Dict | spaces.Tuple):
            # Gymnasium takes one dictionary or tuple of arrays.
            arrays: Any = create_empty_array(space, self.num_envs)
            actions = concatenate(space, actions, arrays)
        self.actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        observations, rewards, terminated, truncated, arrays = self.venv.step(self.actions)
        # Copied, since an environment may write later observations, also those of a reset, into the same array.
        observations = _copied(observations)
        dones = terminated | truncated
        arrays = dict(arrays)  # a copy, since the environment may return the same dictionary again
        final = arrays.pop("final_obs", None)
        final_info = arrays.pop("final_info", {})
        arrays.pop("_final_obs", None), arrays.pop("_final_info", None)
        infos = self._split(arrays)
        for info, cut_off in zip(infos, (truncated & ~terminated).tolist(), strict=True):
            info["TimeLimit.truncated"] = cut_off
        if dones.any():
            observations = self._begin_episodes(observations, dones, final, final_info, infos)
        return observations, rewards.astype(np.float32), dones, infos

    def _begin_episodes(
        self, observations: Any, dones: np.ndarray, final: Any, final_info: dict[str, Any], infos: list[dict[str, Any]]
    ) -> Any:
        """First observations of new episodes where an episode ended. Terminal observations are put into the infos."""
        ended = np.flatnonzero(dones).tolist()
        if self._partial_reset is not None:
            final, (first, arrays) = observations, self._partial_reset(self.venv.unwrapped, dones.copy())
            observations = _merged(observations, first, dones)
            of_reset = self._split(arrays)
            for index in ended:
                self.reset_infos[index] = of_reset[index]
        else:
            of_last = self._split(final_info)
            for index in ended:
                # In this mode, the infos next to `final_info` are those of the reset.
                self.reset_infos[index] = {key: infos[index][key] for key in infos[index] if key != "TimeLimit.truncated"}
                infos[index] = {**of_last[index], "TimeLimit.truncated": infos[index]["TimeLimit.truncated"]}
        for index in ended:
            infos[index]["terminal_observation"] = _copied(_at(final, index))
        return observations

    def _split(self, arrays: dict[str, Any]) -> list[dict[str, Any]]:
        """Split Gymnasium's info dictionary of arrays and masks into one dictionary for each copy."""
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for key, values in arrays.items():
            mask = arrays.get(f"_{key}")
            if key.startswith("_") and key[1:] in arrays:
                continue
            parts = self._split(values) if isinstance(values, dict) else values
            for index in range(self.num_envs) if mask is None else np.flatnonzero(mask).tolist():
                infos[index][key] = parts[index]
        return infos

    @property
    def processes(self) -> list[Any]:
        """Processes of the copies, empty if they have none."""
        return getattr(self.venv.unwrapped, "processes", [])

    def close(self) -> None:
        self.venv.close()

    def get_images(self) -> Sequence[np.ndarray | None]:
        images: Any = self.venv.render()
        return [None] * self.num_envs if images is None else list(images)

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        if attr_name == "render_mode":
            values: Any = [getattr(self.venv, "render_mode", None)] * self.num_envs
        elif isinstance(self.venv.unwrapped, SyncVectorEnv | AsyncVectorEnv):
            values = self.venv.unwrapped.get_attr(attr_name)
        else:
            values = [getattr(self.venv.unwrapped, attr_name)] * self.num_envs
        return [values[index] for index in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        if isinstance(self.venv.unwrapped, SyncVectorEnv | AsyncVectorEnv):
            values = list(self.venv.unwrapped.get_attr(attr_name))
            for index in self._get_indices(indices):
                values[index] = value
            self.venv.unwrapped.set_attr(attr_name, values)
        else:
            setattr(self.venv.unwrapped, attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> list[Any]:
        if isinstance(self.venv.unwrapped, SyncVectorEnv | AsyncVectorEnv) and indices is None:
            return list(self.venv.unwrapped.call(method_name, *method_args, **method_kwargs))
        raise NotImplementedError(
            f"`{method_name}` cannot be called for each copy in {self.venv}, which has no environments of its own: "
            "make them with `make_vec_env`"
        )

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: VecEnvIndices = None) -> list[bool]:
        # Wrappers around single copies are not visible from outside the vectorised environment.
        return [False for _ in self._get_indices(indices)]


def _autoreset_mode(venv: Any) -> AutoresetMode:
    if not isinstance(venv, VectorEnv):
        refuse("venv", venv, "it is not a `gymnasium.vector.VectorEnv`; single environments go into a `DummyVecEnv`")
    mode = venv.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
    return mode if isinstance(mode, AutoresetMode) else AutoresetMode(mode)


def _takes_seeds(venv: VectorEnv) -> bool:
    return isinstance(venv.unwrapped, SyncVectorEnv | AsyncVectorEnv)


def _find_partial_reset(venv: VectorEnv) -> PartialReset | None:
    inner = venv.unwrapped
    if inner is not venv:
        # A reset of the inner environment would bypass the wrappers, which may change observations.
        return None
    if isinstance(inner, SyncVectorEnv | AsyncVectorEnv):
        return lambda env, mask: env.reset(options={"reset_mask": mask})
    if type(inner).__name__ == "CartPoleVectorEnv":
        return _reset_cart_poles
    # EnvPool creates its classes with a metaclass, so that only a parent class may be from its modules.
    if any(cls.__module__.split(".")[0] == "envpool" for cls in type(inner).__mro__):
        return _reset_envpool
    return None


def _reset_cart_poles(env: Any, mask: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
    # The same as its next step would do
    env.state[:, mask] = env.np_random.uniform(low=env.low, high=env.high, size=(4, mask.sum()))
    env.steps[mask] = 0
    env.prev_done[mask] = False
    return env.state.T.astype(np.float32), {}


def _reset_envpool(env: Any, mask: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
    indices = np.flatnonzero(mask)
    first, _ = env.reset(indices)
    observations = np.zeros((len(mask), *first.shape[1:]), first.dtype)
    observations[indices] = first
    return observations, {}


def _copied(observations: Any) -> Any:
    if isinstance(observations, dict):
        return {key: np.array(part) for key, part in observations.items()}
    return np.array(observations)


def _at(observations: Any, index: int) -> Any:
    if isinstance(observations, dict):
        return {key: part[index] for key, part in observations.items()}
    return observations[index]


def _merged(observations: Any, first: Any, mask: np.ndarray) -> Any:
    if isinstance(observations, dict):
        return {key: _merged(part, first[key], mask) for key, part in observations.items()}
    return np.where(mask.reshape(-1, *[1] * (observations.ndim - 1)), first, observations)
