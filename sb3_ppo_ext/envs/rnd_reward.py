"""Random Network Distillation (RND): an intrinsic reward for observations that are unlike those seen so far."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.preprocessing import get_flattened_obs_dim, is_image_space, preprocess_obs
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn
from torch import nn

from sb3_ppo_ext.common.atomic_files import written_atomically
from sb3_ppo_ext.common.pickles import read_pickled
from sb3_ppo_ext.common.type_aliases import Arrays, Info
from sb3_ppo_ext.common.validation import check_number, check_sizes, check_type, refuse
from sb3_ppo_ext.envs.tensors.tensor_vec_transpose_image import steps_in_tensors

# Added to variances that are divided by
EPSILON = 1e-8


class RNDReward(VecEnvWrapper):
    """
    Adds an intrinsic reward to the rewards of a vectorised environment: the error with which a network predicts the outputs of
    a fixed random network for the next observation. It learns to predict them for observations that it has seen::

        r_t + coef * e_t / std(R),    e_t = mean((predictor(x) - target(x))^2),    x = clip((s_t+1 - mean) / std, -5, 5)

    ``mean`` and ``std`` are running statistics of the observations, and ``std(R)`` is that of the discounted sums of errors
    ``R <- gamma R + e``. ``info["extrinsic_reward"]`` and ``info["intrinsic_reward"]`` are the two parts of the reward, the
    second one without ``coef``. The returns of a ``Monitor`` inside of this wrapper are those of the environment alone.

    Paper: https://arxiv.org/abs/1810.12894. It has a second critic for the intrinsic rewards, whose returns do not end with
    the episode; here, one critic sees the sum, and the returns end with the episode.

    Like ``VecNormalize``, it has an attribute :attr:`training`: without it, rewards are those of the environment, and nothing
    is learned. In a distributed training, each rank has a predictor of its own, for its own environments.

    :param venv: Vectorised environments, with observations that are vectors or discrete, or a ``Dict`` of them
    :param coef: Coefficient of the intrinsic reward, at least 0
    :param gamma: Discount factor of the sums that the intrinsic reward is normalised by, in [0, 1]
    :param episodic: Whether these sums begin anew with each episode
    :param obs_keys: Keys of the observations to be explored, ``None`` for all
    :param clip_obs: Largest absolute value of a normalised observation, greater than 0
    :param net_arch: Sizes of the hidden layers of both networks
    :param n_features: Number of outputs of both networks
    :param learning_rate: Learning rate of the predictor's optimiser, Adam, greater than 0
    :param n_steps: Number of steps after which the predictor learns from them, at least 1
    :param n_epochs: Number of passes over these steps, at least 1
    :param batch_size: Number of observations in a minibatch, at least 1
    :param seed: Seed of both networks and of the order of minibatches; the global generators are not used
    :param training: Whether there are intrinsic rewards, and the predictor learns
    :param device: Device of the networks
    :raises ValueError: if an argument is not valid, or the observations are not supported
    """

    def __init__(
        self,
        venv: VecEnv,
        coef: float = 1.0,
        gamma: float = 0.99,
        episodic: bool = False,
        obs_keys: Sequence[str] | None = None,
        clip_obs: float = 5.0,
        net_arch: Sequence[int] = (64, 64),
        n_features: int = 64,
        learning_rate: float = 1e-3,
        n_steps: int = 128,
        n_epochs: int = 1,
        batch_size: int = 256,
        seed: int = 0,
        training: bool = True,
        device: th.device | str = "cpu",
    ):
        check_type("venv", venv, VecEnv, "give vectorised environments, such as those of `make_vec_env`")
        if steps_in_tensors(venv):
            refuse("venv", venv, "it steps in tensors, which this wrapper does not; give environments that step in NumPy")
        super().__init__(venv)
        check_number("coef", coef, 0)
        check_number("gamma", gamma, 0, 1)
        for name, number in {"clip_obs": clip_obs, "learning_rate": learning_rate}.items():
            check_number(name, number, 0, open_low=True)
        for name, integer in {"n_steps": n_steps, "n_epochs": n_epochs, "batch_size": batch_size}.items():
            check_number(name, integer, 1, integer=True)
        check_type("net_arch", net_arch, (list, tuple), "give the sizes of the hidden layers, such as [64, 64]")
        check_sizes({"n_features": n_features, **{f"net_arch[{i}]": size for i, size in enumerate(net_arch)}})
        check_number("seed", seed, 0, 2**32 - 1, integer=True)
        self.coef, self.gamma, self.episodic, self.clip_obs, self.training = coef, gamma, episodic, clip_obs, training
        self.n_steps, self.n_epochs, self.batch_size = n_steps, n_epochs, batch_size
        self.parts = _explored_parts(venv, obs_keys)
        size = sum(get_flattened_obs_dim(part) for part in self.parts.values())
        self.obs_rms, self.ret_rms = RunningMeanStd(shape=(size,)), RunningMeanStd(shape=())
        self.returns = np.zeros(self.num_envs)
        self.rng = np.random.default_rng(seed)
        sizes = [size, *net_arch, n_features]
        self.target, self.predictor = (_network(sizes, self.rng).to(device) for _ in range(2))
        self.target.requires_grad_(False)
        self.optimizer = th.optim.Adam(self.predictor.parameters(), lr=learning_rate)
        # Normalised observations that the predictor has not learned from yet, one array for each step
        self.seen: list[np.ndarray] = []

    def reset(self) -> VecEnvObs:
        """
        :return: Observations of new episodes
        """
        self.returns[:] = 0.0
        return self.venv.reset()

    def step_wait(self) -> VecEnvStepReturn:
        """
        :return: Observations, rewards with the intrinsic ones, whether episodes have ended, and infos with both parts
        """
        observations, rewards, dones, infos = self.venv.step_wait()
        if not self.training:
            return observations, rewards, dones, infos
        intrinsic = self._intrinsic_rewards(self._next_observations(observations, dones, infos), dones)
        infos = [
            {**info, "extrinsic_reward": float(one), "intrinsic_reward": float(other)}
            for info, one, other in zip(infos, rewards, intrinsic, strict=True)
        ]
        return observations, (rewards + self.coef * intrinsic).astype(np.float32), dones, infos

    def _next_observations(self, observations: VecEnvObs, dones: np.ndarray, infos: list[Info]) -> np.ndarray:
        """Observations after the step as vectors, those of the old episode where one has ended, shape ``(n_envs, size)``."""
        flat = self._flat(observations)
        for index in np.flatnonzero(dones):
            terminal = infos[index].get("terminal_observation")
            if terminal is not None:
                batch = {key: np.asarray(part)[np.newaxis] for key, part in _by_key(terminal).items()}
                flat[index] = self._flat(batch if isinstance(terminal, dict) else batch[""])[0]
        return flat

    def _flat(self, observations: VecEnvObs) -> np.ndarray:
        by_key = _by_key(observations)
        vectors: list[Arrays] = [
            preprocess_obs(th.as_tensor(np.array(by_key[key])), space, normalize_images=False)
            for key, space in self.parts.items()
        ]
        return np.concatenate([vector.reshape(len(vector), -1).numpy() for vector in vectors], axis=1)

    def _intrinsic_rewards(self, observations: np.ndarray, dones: np.ndarray) -> np.ndarray:
        self.obs_rms.update(observations)
        normalized = self._normalized(observations)
        errors = self.errors(normalized)
        self.returns = self.returns * self.gamma + errors
        self.ret_rms.update(self.returns)
        if self.episodic:
            self.returns[dones] = 0.0
        self.seen.append(normalized)
        if len(self.seen) == self.n_steps:
            self._learn()
        intrinsic: np.ndarray = errors / np.sqrt(self.ret_rms.var + EPSILON)
        return intrinsic

    def _normalized(self, observations: np.ndarray) -> np.ndarray:
        standardized = (observations - self.obs_rms.mean) / np.sqrt(self.obs_rms.var + EPSILON)
        return np.clip(standardized, -self.clip_obs, self.clip_obs).astype(np.float32)

    def errors(self, normalized: np.ndarray) -> np.ndarray:
        """
        :param normalized: Normalised observations, shape ``(n, size)``
        :return: Mean squared errors of the predictions, shape ``(n,)``
        """
        with th.no_grad():
            errors: np.ndarray = self._errors(normalized).cpu().numpy().astype(np.float64)
        return errors

    def _errors(self, normalized: np.ndarray) -> th.Tensor:
        inputs = th.as_tensor(normalized, device=next(self.target.parameters()).device)
        errors: th.Tensor = (self.predictor(inputs) - self.target(inputs)).square().mean(dim=1)
        return errors

    def _learn(self) -> None:
        """Let the predictor learn from the observations that it has not learned from yet."""
        observations, self.seen = np.concatenate(self.seen), []
        for _ in range(self.n_epochs):
            indices = self.rng.permutation(len(observations))
            for start in range(0, len(indices), self.batch_size):
                self.optimizer.zero_grad()
                self._errors(observations[indices[start : start + self.batch_size]]).mean().backward()
                self.optimizer.step()

    # Files

    def __getstate__(self) -> dict[str, object]:
        """
        :return: Everything but the environments, and what depends on their number
        """
        left_out = ("venv", "class_attributes", "returns", "seen", "num_envs", "reset_infos", "_seeds", "_options")
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, object]) -> None:
        """
        Restore everything but the environments; :meth:`set_venv` must follow.

        :param state: State from ``__getstate__``
        """
        vars(self).update(state, venv=None)

    def set_venv(self, venv: VecEnv) -> None:
        """
        :param venv: Vectorised environments to wrap, after unpickling
        :raises ValueError: if its observations are not those that the predictor has learned from
        """
        known = self.parts
        VecEnvWrapper.__init__(self, venv)
        self.parts = _explored_parts(venv, None if "" in known else list(known))
        if self.parts != known:
            refuse("venv", venv, f"its observations are not those of the saved wrapper, {known}")
        self.returns, self.seen = np.zeros(self.num_envs), []

    def save(self, save_path: str | Path) -> None:
        """
        Save the networks, the optimiser and the statistics, as ``VecNormalize`` saves its own.

        :param save_path: File to write
        """
        with written_atomically(save_path) as file:
            pickle.dump(self, file)

    @staticmethod
    def load(load_path: str | Path, venv: VecEnv) -> RNDReward:
        """
        Load what :meth:`save` has written. It is unpickled, which executes code of the file: load only trusted files.

        :param load_path: File to read
        :param venv: Vectorised environments to wrap
        :return: The wrapper around these environments
        :raises ValueError: if it is no such file, or the observations are not those of the saved wrapper
        """
        wrapper = read_pickled("load_path", load_path, RNDReward)
        wrapper.set_venv(venv)
        return wrapper


def without_rewards_of_rnd(env: VecEnv) -> VecEnv:
    """
    :param env: Environments for evaluation, with their wrappers
    :return: The same environments, with the rewards that they have without :class:`RNDReward`
    """
    wrapped = env
    while isinstance(wrapped, VecEnvWrapper):
        if isinstance(wrapped, RNDReward):
            wrapped.training = False
        wrapped = wrapped.venv
    return env


def _by_key(observations: VecEnvObs) -> dict[str, Arrays]:
    return observations if isinstance(observations, dict) else {"": observations}


def _explored_parts(venv: VecEnv, keys: Sequence[str] | None) -> dict[str, spaces.Space]:
    """Spaces of the parts of an observation that are explored; the key is empty if it is no dictionary."""
    space = venv.observation_space
    if not isinstance(space, spaces.Dict):
        if keys is not None:
            refuse("obs_keys", keys, f"the observations are no dictionaries, but in {space}; give None")
        parts: dict[str, spaces.Space] = {"": space}
    else:
        chosen = list(space.spaces) if keys is None else keys
        if isinstance(chosen, str) or not chosen or not set(chosen) <= space.spaces.keys():
            refuse("obs_keys", keys, f"give a list of keys of the observations: {', '.join(map(repr, space.spaces))}")
        parts = {key: space.spaces[key] for key in chosen}
    kinds = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    for key, part in parts.items():
        if is_image_space(part) or not isinstance(part, kinds):
            remedy = "this wrapper has no networks for images; give a Dict, and the keys of its vectors as `obs_keys`"
            refuse("venv", venv, f"its observations{f' {key!r}' if key else ''} are in {part}: {remedy}")
    return parts


def _network(sizes: Sequence[int], rng: np.random.Generator) -> nn.Sequential:
    """Perceptron with orthogonal weights from this generator, and biases 0."""
    layers: list[nn.Module] = []
    for n_inputs, n_outputs in itertools.pairwise(sizes):
        layer = nn.utils.skip_init(nn.Linear, n_inputs, n_outputs)  # without a draw from the global generator
        with th.no_grad():
            layer.weight.copy_(th.from_numpy(_orthogonal(n_outputs, n_inputs, rng)))
            layer.bias.zero_()
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _orthogonal(n_rows: int, n_columns: int, rng: np.random.Generator) -> np.ndarray:
    """Matrix with orthogonal rows or columns, of length sqrt(2) as suits ReLU."""
    columns, _ = np.linalg.qr(rng.standard_normal((max(n_rows, n_columns), min(n_rows, n_columns))))
    matrix = np.sqrt(2) * (columns if n_rows >= n_columns else columns.T)
    return np.ascontiguousarray(matrix, np.float32)
