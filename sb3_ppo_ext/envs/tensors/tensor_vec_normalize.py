"""SB3's ``VecNormalize`` in tensors."""

from __future__ import annotations

import pickle
from typing import Any, SupportsIndex

import numpy as np
import torch as th
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv, VecNormalize
from stable_baselines3.common.vec_env.base_vec_env import VecEnvStepReturn

from sb3_ppo_ext.common.atomic_files import written_atomically
from sb3_ppo_ext.common.pickles import read_pickled
from sb3_ppo_ext.common.type_aliases import Arrays
from sb3_ppo_ext.common.validation import refuse
from sb3_ppo_ext.distributed.ranks import SINGLE, Ranks
from sb3_ppo_ext.distributed.statistics import rows_of_all
from sb3_ppo_ext.envs.tensors.tensor_spaces import map_tensors
from sb3_ppo_ext.envs.tensors.tensor_vec_env import TensorObs, TensorStep, TensorVecEnv, changed_step


class TensorMeanStd(RunningMeanStd):
    """
    SB3's ``RunningMeanStd`` with its numbers in tensors in float64, which :meth:`update_tensor` changes in place. ``mean``,
    ``var`` and ``count`` read and write them in NumPy. Copies are a ``RunningMeanStd``.

    :param source: Statistics to begin with
    :param device: Device of the tensors
    """

    # Ranks of a distributed training, with whose rows the statistics are updated as well
    ranks: Ranks = SINGLE

    def __init__(self, source: RunningMeanStd, device: th.device):
        self._mean = th.tensor(np.asarray(source.mean), dtype=th.float64, device=device)
        self._var = th.tensor(np.asarray(source.var), dtype=th.float64, device=device)
        self._count = th.tensor(float(source.count), dtype=th.float64, device=device)

    @property
    def mean(self) -> np.ndarray:
        """Running mean."""
        return self._mean.cpu().numpy().copy()

    @mean.setter
    def mean(self, value: np.ndarray) -> None:
        self._mean.copy_(th.as_tensor(np.asarray(value)))

    @property
    def var(self) -> np.ndarray:
        """Running variance."""
        return self._var.cpu().numpy().copy()

    @var.setter
    def var(self, value: np.ndarray) -> None:
        self._var.copy_(th.as_tensor(np.asarray(value)))

    @property
    def count(self) -> float:
        """Number of rows that were seen."""
        return float(self._count)

    @count.setter
    def count(self, value: float) -> None:
        self._count.fill_(float(value))

    def update_tensor(self, batch: th.Tensor) -> None:
        """
        :param batch: New rows, shape ``(n_rows, *shape)``
        """
        var, mean = th.var_mean(batch if batch.is_floating_point() else batch.double(), dim=0, correction=0)
        self._add(batch.shape[0], mean.double() - self._mean, var.double())

    def update_with_nothing(self) -> None:
        """Take part in an update of the other ranks, without rows of this one."""
        self._add(0, th.zeros_like(self._mean), th.zeros_like(self._var))

    def _add(self, n_rows: Any, delta: th.Tensor, var: th.Tensor) -> None:
        """Add rows, given their number, the difference of their mean from the present one, and their variance."""
        if self.ranks.are_several:
            n_rows, delta, var = rows_of_all(self.ranks, n_rows, delta, var)
        total = self._count + n_rows
        self._var.mul_(self._count).add_(var * n_rows).add_(delta.square() * (self._count * n_rows / total))
        self._var.div_(total)
        self._mean.add_(delta * (n_rows / total))
        self._count.copy_(total)

    def normalized(self, values: th.Tensor, epsilon: float, clip: float, centred: bool = True) -> th.Tensor:
        """
        :param values: Rows, shape ``(n_rows, *shape)``
        :param epsilon: What is added to the variance
        :param clip: Largest absolute value
        :param centred: Whether the mean is subtracted
        :return: Normalised rows in float32
        """
        values = values.double() - self._mean if centred else values.double()
        return (values / (self._var + epsilon).sqrt()).clamp(-clip, clip).to(th.float32)

    def clone(self) -> TensorMeanStd:
        """
        :return: A copy on the same device
        """
        made = TensorMeanStd.__new__(TensorMeanStd)
        made._mean, made._var, made._count = (part.clone() for part in (self._mean, self._var, self._count))
        return made

    def __deepcopy__(self, memo: object) -> RunningMeanStd:
        # SB3's `sync_envs_normalization` assigns copies, also to a `VecNormalize`.
        return self.copy()


class TensorVecNormalize(VecNormalize):
    """
    SB3's ``VecNormalize`` for a :class:`TensorVecEnv`: the same mathematics, in tensors and without waiting for the device, in
    :meth:`reset_tensors` and :meth:`step_tensors` as well as with SB3's methods. The running statistics are on the device;
    ``obs_rms`` and ``ret_rms`` read and write them. Files and pickles are those of ``VecNormalize``, in both directions.

    :param venv: Environment that steps in tensors
    :param training: Whether the statistics are updated
    :param norm_obs: Whether observations are normalised
    :param norm_reward: Whether rewards are normalised
    :param clip_obs: Largest absolute value of a normalised observation
    :param clip_reward: Largest absolute value of a normalised reward
    :param gamma: Discount factor of the returns whose variance normalises rewards
    :param epsilon: What is added to variances
    :param norm_obs_keys: Keys of the observations that are normalised if they are a dictionary, by default all
    :raises ValueError: if the environment does not step in tensors, or has observations that cannot be normalised
    """

    venv: TensorVecEnv
    #: Running statistics of the observations, or a dictionary of them; not set without `norm_obs`
    obs_rms: Any
    #: Running statistics of the discounted returns
    ret_rms: Any

    def __init__(
        self,
        venv: VecEnv,
        training: bool = True,
        norm_obs: bool = True,
        norm_reward: bool = True,
        clip_obs: float = 10.0,
        clip_reward: float = 10.0,
        gamma: float = 0.99,
        epsilon: float = 1e-8,
        norm_obs_keys: list[str] | None = None,
    ):
        self.venv = _checked(venv)
        self._old_step: tuple[TensorObs | None, th.Tensor | None] = (None, None)
        super().__init__(
            venv, training, norm_obs, norm_reward, clip_obs, clip_reward, gamma, epsilon, norm_obs_keys=norm_obs_keys
        )

    @classmethod
    def of(cls, normalize: VecNormalize, venv: VecEnv | None = None) -> TensorVecNormalize:
        """
        :param normalize: SB3's normalisation
        :param venv: Environment that steps in tensors, by default that of ``normalize``
        :return: The same normalisation in tensors
        :raises ValueError: if the environment does not step in tensors
        """
        made = cls.__new__(cls)
        made.__setstate__(_settings(normalize))
        made.set_venv(_checked(normalize.venv if venv is None else venv))
        return made

    @property
    def device(self) -> th.device:
        """Device of all tensors."""
        return self.venv.device

    def __setattr__(self, name: str, value: object) -> None:
        # Not properties: without `norm_obs`, SB3's class has no attribute `obs_rms`, which its tools ask for.
        super().__setattr__(name, map_tensors(value, self._on_device) if name in ("obs_rms", "ret_rms") else value)

    @property
    def returns(self) -> np.ndarray:
        """Discounted returns of the running episodes, shape ``(n_envs,)``."""
        return self._returns.cpu().numpy().copy()

    @returns.setter
    def returns(self, value: np.ndarray) -> None:
        self._returns = th.as_tensor(np.asarray(value), dtype=th.float64).clone().to(self.device)

    @property
    def old_obs(self) -> Any:  # type: ignore[override]
        """Observations of the last step or reset, as they were, in NumPy."""
        observations = self._old_step[0]
        return np.array([]) if observations is None else map_tensors(observations, _copied)

    @property
    def old_reward(self) -> np.ndarray:
        """Rewards of the last step, as they were, in NumPy."""
        return np.array([]) if self._old_step[1] is None else _copied(self._old_step[1])

    @old_reward.setter
    def old_reward(self, value: np.ndarray) -> None:
        """SB3's constructor sets it; the rewards are those of the last step."""

    def _on_device(self, source: RunningMeanStd) -> TensorMeanStd:
        return TensorMeanStd(source, th.device("cpu") if self.venv is None else self.device)

    def reset_tensors(self) -> TensorObs:
        """
        Begin new episodes in all environments.

        :return: First observations, normalised, shape ``(n_envs, *obs_shape)``
        """
        observations = self.venv.reset_tensors()
        self._old_step = (observations, None)
        self._returns.zero_()
        self._update(observations)
        return self._normalized(observations)

    def step_tensors(self, actions: th.Tensor) -> TensorStep:
        """
        Step all environments without waiting for the device.

        :param actions: Actions on the device, shape ``(n_envs, *action_shape)``
        :return: The step, with normalised observations, last observations and rewards. Returns of episodes are those of the
            rewards as they were
        """
        step = self.venv.step_tensors(actions)
        self._old_step = (step.observations, step.rewards)
        self._update(step.observations)
        if self.training:
            self._returns.mul_(self.gamma).add_(step.rewards)
            self.ret_rms.update_tensor(self._returns)
        self._returns.masked_fill_(step.terminated | step.truncated, 0)
        final, rewards = step.final_observations, step.rewards
        if self.norm_reward:
            rewards = self.ret_rms.normalized(rewards, self.epsilon, self.clip_reward, centred=False)
        return step._replace(
            observations=self._normalized(step.observations),
            final_observations=None if final is None else self._normalized(final),
            rewards=rewards,
        )

    def reset(self) -> np.ndarray | dict[str, np.ndarray]:
        """
        Begin new episodes in all environments.

        :return: First observations, normalised, in NumPy
        """
        observations: Arrays = self.venv.reset_to_numpy(self.reset_tensors())
        return observations

    def step_wait(self) -> VecEnvStepReturn:
        """
        Step all environments with the actions of ``step_async``.

        :return: Normalised observations and rewards and the ends of episodes in NumPy, and the infos
        """
        return self.venv.step_to_numpy(self.step_tensors(self.venv.pending_actions()))

    def _update(self, observations: TensorObs) -> None:
        if not (self.training and self.norm_obs):
            return
        if isinstance(observations, dict):
            for key, statistics in self.obs_rms.items():
                statistics.update_tensor(observations[key])
        else:
            self.obs_rms.update_tensor(observations)

    def _normalized(self, observations: TensorObs) -> TensorObs:
        if not self.norm_obs:
            return observations
        if not isinstance(observations, dict):
            return self.obs_rms.normalized(observations, self.epsilon, self.clip_obs)
        parts = {key: self.obs_rms[key].normalized(observations[key], self.epsilon, self.clip_obs) for key in self._keys()}
        return {**observations, **parts}

    def _keys(self) -> list[str]:
        return list(self.norm_obs_keys or ())

    def set_venv(self, venv: VecEnv) -> None:
        """
        :param venv: Environment that steps in tensors, for a normalisation that was made without one
        :raises ValueError: if it does not, or if there is one already
        """
        super().set_venv(_checked(venv))
        for name in vars(self).keys() & {"obs_rms", "ret_rms"}:
            setattr(self, name, getattr(self, name))  # on the device of the environment

    @staticmethod
    def load(load_path: str, venv: VecEnv) -> TensorVecNormalize:
        """
        :param load_path: Path of a file that this class or SB3's ``VecNormalize`` has saved
        :param venv: Environment that steps in tensors
        :return: The normalisation
        :raises ValueError: if it is no such file, or the environment does not step in tensors
        """
        return TensorVecNormalize.of(read_pickled("load_path", load_path, VecNormalize), venv)

    def save(self, save_path: str) -> None:
        """
        Save the statistics and settings, in the format of SB3's ``VecNormalize``.

        :param save_path: Path of the file, which is replaced at once
        """
        with written_atomically(save_path) as file:
            pickle.dump(self, file)

    def __getstate__(self) -> dict[str, object]:
        return {**_settings(self), "old_obs": self.old_obs, "old_reward": self.old_reward}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.venv = None  # type: ignore[assignment]
        self._old_step = (None, None)
        for name in state.keys() & {"obs_rms", "ret_rms"}:
            setattr(self, name, state[name])
        super().__setstate__({key: value for key, value in state.items() if key not in vars(self)})

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return object.__new__, (VecNormalize,), self.__getstate__()


def _checked(venv: object) -> TensorVecEnv:
    if not isinstance(venv, TensorVecEnv):
        refuse("venv", venv, "it does not step in tensors; give a `TensorVecEnv`, or use SB3's `VecNormalize`")
    if (changed := changed_step(venv, TensorVecEnv)) is not None:
        remedy = f"its `{changed}` is not that of `TensorVecEnv`, and would not be called; change `_reset` and `_step`"
        refuse("venv", venv, f"{remedy}, or use SB3's `VecNormalize`")
    return venv


def _settings(normalize: VecNormalize) -> dict[str, object]:
    """What both classes keep under the same names, without what belongs to the environment and its last step."""
    others = ("venv", "class_attributes", "returns", "_returns", "old_obs", "old_reward", "_old_step")
    settings = {key: value for key, value in vars(normalize).items() if key not in others}
    for key in settings.keys() & {"obs_rms", "ret_rms"}:
        settings[key] = map_tensors(settings[key], RunningMeanStd.copy)
    return settings


def _copied(tensor: th.Tensor) -> np.ndarray:
    return np.array(tensor.cpu().numpy())
