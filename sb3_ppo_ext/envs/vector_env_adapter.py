"""Adapter from the vectorised environments of Gymnasium to those of SB3."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.utils import concatenate, create_empty_array
from gymnasium.wrappers import vector as wrappers
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from sb3_ppo_ext.common.observations import map_observations, observations_at
from sb3_ppo_ext.common.type_aliases import Arrays, Info
from sb3_ppo_ext.common.validation import refuse
from sb3_ppo_ext.envs.time_limits import LIMIT, time_limit_of

PartialReset = Callable[[Any, np.ndarray], tuple[Any, Any]]
#: Remedies for environments of which some copies cannot be reset
SAME_STEP = 'make it with `autoreset_mode="SameStep"`, or give a function as `partial_reset`'
AROUND = "put SB3's wrappers around the adapter instead, such as `VecMonitor`, `VecNormalize` or a `VecEnvWrapper`"


class VectorEnvAdapter(VecEnv):
    """
    Makes a vectorised environment of Gymnasium a ``VecEnv`` of SB3, for environments that step all copies in one call::

        env = VecMonitor(VectorEnvAdapter(gym.make_vec("CartPole-v1", num_envs=64, vectorization_mode="vector_entry_point")))

    SB3 requires the first observation of the next episode at the last step of an episode. The environment must either return
    it (``AutoresetMode.SAME_STEP``), or be able to reset some of its copies, as ``SyncVectorEnv``, ``AsyncVectorEnv``,
    Gymnasium's ``CartPoleVectorEnv`` and the environments of EnvPool are. Wrappers of Gymnasium around ``SyncVectorEnv`` and
    ``AsyncVectorEnv`` take part in such resets, so that first observations are transformed as all others.

    If the environment takes one seed for each copy, the seeds are ``seed + index``, as in ``DummyVecEnv``.

    :param venv: Vectorised environment of Gymnasium
    :param partial_reset: Function that resets some copies, for environments that are not listed above. It takes ``venv``, with
        its wrappers, and a mask of shape ``(n_envs,)``, resets the copies in the mask, and returns observations and infos as
        ``reset`` does; only those of the copies in the mask are used
    :raises ValueError: if ``venv`` is not a ``VectorEnv``, or cannot reset some of its copies
    """

    def __init__(self, venv: VectorEnv, partial_reset: PartialReset | None = None):
        self.venv = venv
        mode = _autoreset_mode(venv)
        _check_results(venv, mode)
        self._partial_reset = None if mode == AutoresetMode.SAME_STEP else partial_reset or _find_partial_reset(venv, mode)
        statistics = [each for each in _wrappers_of(venv) if isinstance(each, wrappers.RecordEpisodeStatistics)]
        # Keys of infos that belong to the last step of an episode, also where the others are those of the reset
        self._of_last_step = {"TimeLimit.truncated", *(getattr(each, "_stats_key", "episode") for each in statistics)}
        super().__init__(venv.num_envs, venv.single_observation_space, venv.single_action_space)

    @property
    def _max_episode_steps(self) -> int | None:
        """Time limit of an episode, see ``time_limits.py``"""
        venv = self.venv.unwrapped
        if isinstance(venv, SyncVectorEnv):
            return time_limit_of(venv.envs[0])
        if isinstance(venv, AsyncVectorEnv):  # which ends the processes of environments without the attribute
            return venv.get_attr(LIMIT)[0] if venv.call("has_wrapper_attr", LIMIT)[0] else None
        return getattr(venv, "max_episode_steps", getattr(self.venv.spec, "max_episode_steps", None))

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
        return map_observations(np.array, observations)

    def step_async(self, actions: Arrays) -> None:
        space = self.action_space
        if isinstance(space, spaces.Dict | spaces.Tuple):
            # Gymnasium takes one dictionary or tuple of arrays.
            arrays: Arrays = create_empty_array(space, self.num_envs)
            actions = concatenate(space, actions, arrays)
        self.actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        observations, rewards, terminated, truncated, arrays = self.venv.step(self.actions)
        # Copied, since an environment may write later observations, also those of a reset, into the same array.
        observations = map_observations(np.array, observations)
        dones = terminated | truncated
        # A copy, since the environment may return the same dictionaries again
        arrays = dict(arrays) if isinstance(arrays, dict) else [dict(info) for info in arrays]
        final, final_info = _taken(arrays, "final_obs"), _taken(arrays, "final_info")
        infos = self._split(arrays)
        for info, cut_off in zip(infos, (truncated & ~terminated).tolist(), strict=True):
            info["TimeLimit.truncated"] = cut_off
        if dones.any():
            observations = self._begin_episodes(observations, dones, final, final_info, infos)
        return observations, rewards.astype(np.float32), dones, infos

    def _begin_episodes(
        self, observations: VecEnvObs, dones: np.ndarray, final: Arrays, final_info: Any, infos: list[Info]
    ) -> Any:
        """First observations of new episodes where an episode ended. Terminal observations are put into the infos."""
        ended = np.flatnonzero(dones).tolist()
        if self._partial_reset is not None:
            final, (first, arrays) = observations, self._partial_reset(self.venv, dones.copy())
            observations = _merged(observations, first, dones)
            of_reset = self._split(arrays)
            for index in ended:
                self.reset_infos[index] = of_reset[index]
        else:
            of_last = self._split(final_info or {})
            for index in ended:
                # In this mode, the infos next to `final_info` are those of the reset, except for what wrappers add.
                last = {key: infos[index].pop(key) for key in self._of_last_step & infos[index].keys()}
                self.reset_infos[index] = infos[index]
                infos[index] = {**(of_last[index] or {}), **last}
        for index in ended:
            infos[index]["terminal_observation"] = map_observations(np.array, observations_at(final, index))
        return observations

    def _split(self, arrays: Arrays) -> list[Info]:
        """Split Gymnasium's info dictionary of arrays and masks into one dictionary for each copy, if it is one."""
        if not isinstance(arrays, dict):
            return list(arrays)  # of `DictInfoToList`
        infos: list[Info] = [{} for _ in range(self.num_envs)]
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

    def set_attr(self, attr_name: str, value: object, indices: VecEnvIndices = None) -> None:
        if isinstance(self.venv.unwrapped, SyncVectorEnv | AsyncVectorEnv):
            values = list(self.venv.unwrapped.get_attr(attr_name))
            for index in self._get_indices(indices):
                values[index] = value
            self.venv.unwrapped.set_attr(attr_name, values)
        else:
            setattr(self.venv.unwrapped, attr_name, value)

    def env_method(
        self, method_name: str, *method_args: object, indices: VecEnvIndices = None, **method_kwargs: object
    ) -> list[object]:
        if isinstance(self.venv.unwrapped, SyncVectorEnv | AsyncVectorEnv) and indices is None:
            return list(self.venv.unwrapped.call(method_name, *method_args, **method_kwargs))
        raise NotImplementedError(
            f"`{method_name}` cannot be called for each copy in {self.venv}, which has no environments of its own: "
            "make them with `make_vec_env`"
        )

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: VecEnvIndices = None) -> list[bool]:
        # Wrappers around single copies are not visible from outside the vectorised environment.
        return [False for _ in self._get_indices(indices)]


def _autoreset_mode(venv: object) -> AutoresetMode:
    if not isinstance(venv, VectorEnv):
        refuse("venv", venv, "it is not a `gymnasium.vector.VectorEnv`; single environments go into a `DummyVecEnv`")
    mode = venv.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
    return mode if isinstance(mode, AutoresetMode) else AutoresetMode(mode)


def _takes_seeds(venv: VectorEnv) -> bool:
    return isinstance(venv.unwrapped, SyncVectorEnv | AsyncVectorEnv)


def _wrappers_of(venv: object) -> Iterator[VectorWrapper]:
    """Wrappers around a vectorised environment, the outermost one first."""
    while isinstance(venv, VectorWrapper):
        yield venv
        venv = venv.env


def _check_results(venv: VectorEnv, mode: AutoresetMode) -> None:
    """Refuse environments whose results are no arrays of all copies, and warn of a wrapper that learns something else."""
    base: Any = venv.unwrapped
    sizes = base.config if _is_envpool(base) else {}
    if sizes.get("batch_size", venv.num_envs) != venv.num_envs:
        remedy = "SB3 steps all copies at once, and this one only some of them; make it without `batch_size`"
        refuse("batch_size", sizes["batch_size"], f"{remedy}, or with `batch_size={venv.num_envs}`, that is `num_envs`")
    for each in _wrappers_of(venv):
        # Of `ArrayConversion`, whose module needs a package that few have
        target = getattr(each, "_target_xp", np)
        if target.__name__.split(".")[-1] != "numpy":
            refuse("venv", venv, f"the results of {type(each).__name__} are no NumPy arrays; leave it out")
        # https://github.com/Farama-Foundation/Gymnasium/pull/1668
        knows_modes = not isinstance(each, wrappers.NormalizeReward) or hasattr(each, "_autoreset_mode")
        if mode == AutoresetMode.SAME_STEP and not knows_modes:
            warnings.warn(
                "`NormalizeReward` of this version of Gymnasium leaves out the first reward of each episode and carries the "
                "return over to the next one, if the mode is SAME_STEP. Use SB3's "
                "`VecNormalize(VectorEnvAdapter(venv), norm_obs=False)` instead of it.",
                stacklevel=3,
            )


def _find_partial_reset(venv: VectorEnv, mode: AutoresetMode) -> PartialReset:
    """
    :param venv: Environment
    :param mode: Its mode, in which it does not begin an episode in the step in which one ends
    :return: Function that resets some copies
    :raises ValueError: if there is none
    """
    inner = venv.unwrapped
    if isinstance(inner, SyncVectorEnv | AsyncVectorEnv):
        for each in _wrappers_of(venv):
            _check_wrapper(each, mode)
        return _reset_masked
    cannot = f"it cannot reset some of its copies (its mode is {mode})"
    if inner is not venv:
        # A reset of the inner environment would bypass the wrappers, which may change observations.
        refuse("venv", venv, f"{cannot} through its wrappers; {AROUND}; or {SAME_STEP}")
    if type(inner).__name__ == "CartPoleVectorEnv":
        return _reset_cart_poles
    if _is_envpool(inner):
        return _reset_envpool
    refuse("venv", venv, f"{cannot}; {SAME_STEP}")


def _check_wrapper(wrapper: VectorWrapper, mode: AutoresetMode) -> None:
    """Refuse wrappers that would do something else if some copies are reset."""
    if isinstance(wrapper, wrappers.NormalizeObservation | wrappers.NormalizeReward):
        only = "norm_reward" if isinstance(wrapper, wrappers.NormalizeObservation) else "norm_obs"
        remedy = f"use SB3's `VecNormalize(VectorEnvAdapter(...), {only}=False)` instead of it, whose statistics can be saved"
        refuse("venv", wrapper, f"{type(wrapper).__name__} does not support that some copies are reset; {remedy}")
    own = next((name for name in ("reset", "step") if not _is_of_gymnasium(getattr(type(wrapper), name))), None)
    if own is not None and mode != AutoresetMode.DISABLED:
        # It may rely on a step in which an episode begins, which there is not.
        remedy = 'make the environment with `autoreset_mode="Disabled"`, in which its `reset` gets `options["reset_mask"]`'
        refuse("venv", wrapper, f"`{own}` of {type(wrapper).__name__} may not support that some copies are reset; {remedy}")


def _is_of_gymnasium(function: object) -> bool:
    return str(function.__module__).split(".")[0] == "gymnasium"


def _is_envpool(venv: object) -> bool:
    # EnvPool creates its classes with a metaclass, so that only a parent class may be from its modules.
    return any(cls.__module__.split(".")[0] == "envpool" for cls in type(venv).__mro__)


class _MaskOptions(dict[str, Any]):
    """
    Options of a reset of some copies. Gymnasium's environments take the mask out of them, and its wrappers, which get the same
    dictionary, look for it afterwards: ``RecordEpisodeStatistics`` would forget the returns of all running episodes. Here, all
    of them find it, while copies find no options.
    """

    def __init__(self, mask: np.ndarray):
        self.mask = mask

    def __contains__(self, key: object) -> bool:
        return key == "reset_mask"

    def __missing__(self, key: str) -> object:
        return self.pop(key)

    def pop(self, key: Any, *default: object) -> Any:
        return self.mask if key == "reset_mask" else super().pop(key, *default)

    def __reduce__(self) -> Any:
        return dict, ()


def _reset_masked(env: Any, mask: np.ndarray) -> tuple[object, object]:
    result: tuple[Any, Any] = env.reset(options=_MaskOptions(mask))
    return result


def _taken(infos: Info, key: str) -> Arrays:
    """Remove an entry from the infos of all copies."""
    if isinstance(infos, dict):
        infos.pop(f"_{key}", None)
        return infos.pop(key, None)
    return [info.pop(key, None) for info in infos]


def _reset_cart_poles(env: Any, mask: np.ndarray) -> tuple[np.ndarray, Info]:
    # The same as its next step would do
    env.state[:, mask] = env.np_random.uniform(low=env.low, high=env.high, size=(4, mask.sum()))
    env.steps[mask] = 0
    env.prev_done[mask] = False
    return env.state.T.astype(np.float32), {}


def _reset_envpool(env: Any, mask: np.ndarray) -> tuple[object, dict[str, object]]:
    # The step after the last one of an episode begins the next one, whatever the action. `reset` would do something else with
    # Atari's `episodic_life`: the game would begin anew after each life.
    ended = np.flatnonzero(mask).astype(np.int32)
    first, _, _, _, infos = env.step(create_empty_array(env.single_action_space, len(ended)), ended)
    indices = infos["env_id"]

    def in_rows(part: np.ndarray) -> np.ndarray:
        rows = np.zeros((len(mask), *part.shape[1:]), part.dtype)
        rows[indices] = part
        return rows

    return map_observations(in_rows, first), {}


def _merged(observations: Arrays, first: Arrays, mask: np.ndarray) -> Arrays:
    if isinstance(observations, dict):
        return {key: _merged(part, first[key], mask) for key, part in observations.items()}
    return np.where(mask.reshape(-1, *[1] * (observations.ndim - 1)), first, observations)
