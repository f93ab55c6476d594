"""Environments in JAX, such as those of gymnax and brax, as a ``TensorVecEnv``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Hashable, Mapping
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch as th
from gymnasium import spaces

from sb3_ppo_ext.common.hybrid_actions import map_parts
from sb3_ppo_ext.common.type_aliases import Arrays, JaxEnv, JaxTree
from sb3_ppo_ext.common.validation import check_device, check_number, check_observation_space, refuse
from sb3_ppo_ext.distributed.launch import find_launch
from sb3_ppo_ext.envs.parallel.share_rollout import JaxActor, MaskSource, ShareActor, ShareRollout
from sb3_ppo_ext.envs.tensors.jax_functions import compiled, functions_of, import_jax
from sb3_ppo_ext.envs.tensors.jax_rollout import make_rollout, masked, on_host
from sb3_ppo_ext.envs.tensors.tensor_spaces import in_dtype_of
from sb3_ppo_ext.envs.tensors.tensor_vec_env import TensorObs, TensorStep, TensorVecEnv

# Environment variables that say how much memory of a GPU JAX takes
_OF_MEMORY = (
    *("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR"),
    *("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"),
)
REMEDY = 'set `os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"` before JAX is imported, so that PyTorch has enough'


class JaxVecEnv(TensorVecEnv):
    """
    Many copies of a functional environment in JAX, which are stepped by one compiled function::

        env = JaxVecEnv("CartPole-v1", num_envs=1024)  # of gymnax
        env = JaxVecEnv(brax.envs.create("ant", auto_reset=False), num_envs=4096, device="cuda")
        env = JaxVecEnv(mujoco_playground.registry.load("CartpoleBalance"), num_envs=1024)
        env = JaxVecEnv((reset, step), num_envs=64, observation_space=..., action_space=...)

    The compiled function begins new episodes where one has ended, and also returns the last observations. PyTorch and JAX
    share the memory of the results (DLPack), so that they are not copied; do not write into them. JAX must be installed
    (``pip install 'sb3-ppo-ext[jax]'``).

    gymnax and craftax only say that an episode is over. A second evaluation of the step, without ``max_steps_in_episode`` or
    ``max_timesteps``, tells whether it would have ended anyway. Episodes that end by that limit are truncated; where an
    environment has a limit under another name, they count as terminated.

    :param env: Id or environment of gymnax, or one in its style, as those of craftax; environment of brax that neither begins
        new episodes by itself nor is vectorised (``auto_reset=False, batch_size=None``); environment of MuJoCo Playground
        without ``wrap_for_brax_training``, whose ``episode_length`` is the limit of steps; or a pair of functions,
        ``reset(key) -> (obs, state)`` and ``step(key, state, action) -> (obs, state, reward, terminated, truncated)``, with an
        optional dictionary of scalars for the log at the end
    :param env_params: Parameters of an environment of gymnax, or a dictionary of changes to its own
    :param num_envs: Number of copies
    :param device: Device of the tensors, with ``"auto"`` the one that JAX uses by default. In a distributed training,
        ``"auto"`` and ``"cuda"`` take the GPU with the local number of the rank
    :param observation_space: Observation space of one copy, needed with a pair of functions
    :param action_space: Action space of one copy, needed with a pair of functions
    :param max_episode_steps: Number of steps after which an episode is cut off, by default as the environment says
    :param is_finite_horizon: Whether running out of time belongs to the task, so that such episodes are terminated
    :raises ValueError: if an argument is not valid
    :raises ImportError: if JAX or gymnax is not installed
    """

    #: What cannot be pickled, and has no state of its own, for the check of ``TrainingCheckpoint``
    shared_by_copies: ClassVar[set[str]] = {"env", "_jax", "_jax_device", "_reset_all", "_step_all", "_rollout"}

    def __init__(
        self,
        env: JaxEnv,
        env_params: JaxEnv = None,
        num_envs: int = 1,
        device: th.device | str = "auto",
        observation_space: spaces.Space | None = None,
        action_space: spaces.Space | None = None,
        max_episode_steps: int | None = None,
        is_finite_horizon: bool = False,
    ):
        jax = import_jax()
        check_number("num_envs", num_envs, 1, integer=True)
        if max_episode_steps is not None:
            check_number("max_episode_steps", max_episode_steps, 1, integer=True)
        functions = functions_of(env, env_params)
        observation_space = _known("observation_space", observation_space or functions.observation_space)
        action_space = _known("action_space", action_space or functions.action_space)
        check_observation_space(observation_space)
        self.env = env
        self._jax_device = _jax_device(jax, device)
        if self._jax_device.platform != "cpu" and takes_most_memory(os.environ):
            warnings.warn(f"JAX has reserved three quarters of the memory of {self._jax_device}: {REMEDY}", stacklevel=2)
        super().__init__(num_envs, observation_space, action_space, _torch_device(self._jax_device))
        # For `time_limits.py`
        self._max_episode_steps = max_episode_steps or functions.max_episode_steps or functions.own_limit
        self._jax = jax
        resets_seldom = self._jax_device.platform == "cpu"
        self._reset_all, self._step_all = compiled(functions, num_envs, max_episode_steps, is_finite_horizon, resets_seldom)
        self._set_key(int(np.random.SeedSequence().generate_state(1)[0]))
        self._state: JaxTree = None
        # Rollouts in one compiled function, and what the actors that they are for have in common
        self._rollout: tuple[Hashable, Callable[..., JaxTree] | None] | None = None

    def _set_key(self, seed: int) -> None:
        with self._jax.default_device(self._jax_device):
            self._key = self._jax.device_put(self._jax.random.key(seed % 2**32), self._jax_device)

    def _reset(self, seed: int | None) -> TensorObs:
        if seed is not None:
            self._set_key(seed)
        elif self._state is not None:
            self._key = self._state[0]
        if self.device.type == "cuda":
            # JAX may reuse memory that PyTorch has yet to read: a reset takes no tensor that would make it wait for PyTorch.
            th.cuda.current_stream(self.device).synchronize()
        # A key from a checkpoint is on the device that JAX uses by default.
        observations, self._state = self._reset_all(self._jax.device_put(self._key, self._jax_device))
        return self._to_torch(observations, "reset")

    def _step(self, actions: Arrays) -> TensorStep:
        converted = map_parts(lambda part: _to_jax(self._jax, part.detach()), actions)
        self._state, results = self._step_all(self._state, converted)
        observations, rewards, terminated, truncated, last, log = results
        return TensorStep(
            self._to_torch(observations),
            th.from_dlpack(rewards),
            th.from_dlpack(terminated),
            th.from_dlpack(truncated),
            self._to_torch(last),
            {key: th.from_dlpack(values) for key, values in log.items()},
        )

    def collector(
        self, actor: ShareActor, observations: Arrays, n_steps: int
    ) -> Callable[[MaskSource | None], ShareRollout] | None:
        """
        Make ready a whole rollout in one compiled function, which does what :meth:`step` does up to rounding.

        :param actor: Actor for all copies
        :param observations: Last observations of all copies
        :param n_steps: Number of steps
        :return: Function that steps all copies, given where masks of invalid actions come from; it returns what they returned
            up to the first observation, reward or output of the policy that is not finite. ``None`` if JAX cannot compute
            what the actor does, or cannot trace the environment, or if this does not fit its spaces, as :meth:`step` will say
        """
        if (in_jax := actor.in_jax()) is None:
            return None
        before = (self._state, observations, self._returns.numpy(), self._lengths.numpy().astype(np.int32))
        given = (in_jax.parameters, in_jax.noise, np.arange(n_steps, dtype=np.int32), *before)
        rollout = self._compiled(in_jax, given)
        return None if rollout is None else lambda source: self._collected(rollout(*given), observations, source)

    def _collected(self, made: JaxTree, observations: Arrays, source: MaskSource | None) -> ShareRollout:
        (self._state, returns, lengths), steps = made
        self._returns.copy_(th.from_numpy(np.array(returns)))
        self._lengths.copy_(th.from_numpy(np.array(lengths)))
        rollout = on_host(self, observations, steps)
        return rollout if source is None else masked(rollout, source)

    def _compiled(self, actor: JaxActor, given: JaxTree) -> Callable[..., JaxTree] | None:
        """Rollouts with actors that compute the same, compiled by the first of them."""
        key = (actor.key, actor.n_held)
        if self._rollout is None or self._rollout[0] != key:
            made = make_rollout(self._step_all, actor.act, actor.n_held, self)
            try:
                self._jax.eval_shape(made, *given)
                self._rollout = key, self._jax.jit(made)
            except (TypeError, ValueError, KeyError):  # of the environment, which the first step will raise or do without
                self._rollout = key, None
        return self._rollout[1]

    def _to_torch(self, observations: object, function: str = "step") -> TensorObs:
        """Tensors that share the memory of the arrays, if the space has the dtype of the arrays."""
        space = self.observation_space
        if not isinstance(space, spaces.Dict):
            return self._tensor(observations, space, function)
        if not isinstance(observations, Mapping) or not space.spaces.keys() <= observations.keys():
            self._refuse(function, observations, f"a dictionary with the keys {list(space)}")
        return {key: self._tensor(observations[key], part, function, key) for key, part in space.spaces.items()}

    def _tensor(self, array: object, space: spaces.Space, function: str, key: str | None = None) -> th.Tensor:
        name = "observations" if key is None else f"observations[{key!r}]"
        if not hasattr(array, "__dlpack__"):
            self._refuse(function, array, "an array", name)
        return in_dtype_of(space, th.from_dlpack(array), name)

    def _refuse(self, function: str, value: object, expected: str, name: str = "observations") -> NoReturn:
        keys = f" with the keys {list(value)}" if isinstance(value, Mapping) else ""
        order = "obs, state" if function == "reset" else "obs, state, reward, terminated, truncated"
        remedy = f"`{function}` returns a {type(value).__name__}{keys} in their place; return {expected} there: {order}"
        refuse(name, value, remedy)

    def _owner(self, name: str) -> object:
        return self.env if hasattr(self.env, name) and not isinstance(self.env, str | tuple) else self


def takes_most_memory(environment: Mapping[str, str]) -> bool:
    """
    :param environment: Environment variables
    :return: Whether JAX reserves three quarters of a GPU, which PyTorch then lacks. Nothing is said to users who have decided
    """
    return not any(name in environment for name in _OF_MEMORY)


def _known(name: str, space: spaces.Space | None) -> spaces.Space:
    if space is None:
        refuse(name, None, "the environment does not say it; give it as an argument")
    return space


def _to_jax(jax: Any, tensor: th.Tensor) -> JaxTree:
    """Array that shares the memory of the tensor, except of int64, which JAX has not by default."""
    if tensor.device.type == "cpu":
        # Compiled functions take NumPy's arrays in a fraction of the time of DLPack. They have read it when they return.
        return tensor.numpy()
    tensor = tensor.to(th.int32) if tensor.dtype == th.int64 else tensor
    return jax.dlpack.from_dlpack(tensor.contiguous())


def _jax_device(jax: Any, device: th.device | str) -> Any:
    if device == "auto":
        has_cuda = jax.default_backend() in ("gpu", "cuda") and th.cuda.is_available()
        return _own_gpu(jax.local_devices()) if has_cuda else jax.local_devices(backend="cpu")[0]
    check_device(device)
    made = th.device(device)
    try:
        devices = jax.local_devices(backend=made.type)
        return _own_gpu(devices) if made == th.device("cuda") else devices[made.index or 0]
    except (RuntimeError, IndexError) as error:
        remedy = f'JAX has no such device here ({str(error).splitlines()[0]}); give "cpu", or install JAX for it'
        refuse("device", str(device), remedy)


def _own_gpu(devices: list[object]) -> Any:
    """That of this rank of a distributed training, as for models."""
    return devices[find_launch("auto").local_rank % len(devices)]


def _torch_device(device: Any) -> th.device:
    # `id` counts the devices of all processes that `jax.distributed` has joined.
    return th.device("cpu") if device.platform == "cpu" else th.device("cuda", device.local_hardware_id)
