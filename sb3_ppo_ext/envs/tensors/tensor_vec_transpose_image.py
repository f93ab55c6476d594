"""SB3's ``VecTransposeImage`` in tensors."""

from __future__ import annotations

import torch as th
from stable_baselines3.common.vec_env import VecTransposeImage

from sb3_ppo_ext.envs.tensors.tensor_vec_env import TensorObs, TensorStep, TensorVecEnv, changed_step
from sb3_ppo_ext.envs.tensors.tensor_vec_normalize import TensorVecNormalize


class TensorVecTransposeImage(VecTransposeImage):
    """
    SB3's ``VecTransposeImage``, which moves the channels of images to the front, for environments that step in tensors.
    ``PPOExt`` wraps such environments in it, as SB3 wraps others.

    :param venv: Environment that steps in tensors, with images of shape ``(height, width, channels)``
    :param skip: Whether to leave all images as they are
    """

    venv: TensorVecEnv

    @property
    def device(self) -> th.device:
        """Device of all tensors."""
        device: th.device = self.venv.device
        return device

    def reset_tensors(self) -> TensorObs:
        """
        Begin new episodes in all environments.

        :return: First observations, shape ``(n_envs, *obs_shape)``
        """
        return self._transposed(self.venv.reset_tensors())

    def step_tensors(self, actions: th.Tensor) -> TensorStep:
        """
        Step all environments without waiting for the device.

        :param actions: Actions on the device, shape ``(n_envs, *action_shape)``
        :return: The step, with the channels of images in front
        """
        step: TensorStep = self.venv.step_tensors(actions)
        final = step.final_observations
        return step._replace(
            observations=self._transposed(step.observations),
            final_observations=None if final is None else self._transposed(final),
        )

    def _transposed(self, observations: TensorObs) -> TensorObs:
        if self.skip:
            return observations
        if isinstance(observations, dict):
            return observations | {key: observations[key].movedim(-1, 1) for key in self.image_space_keys}
        return observations.movedim(-1, 1)


def steps_in_tensors(env: object) -> bool:
    """
    :param env: Vectorised environment, perhaps in wrappers
    :return: Whether it has ``reset_tensors`` and ``step_tensors``. Other wrappers forward them, but do not take part in them,
        and neither do methods of SB3 that a subclass or a script has replaced
    """
    for wrapper in (TensorVecTransposeImage, TensorVecNormalize):
        if isinstance(env, wrapper):
            return changed_step(env, wrapper) is None and steps_in_tensors(env.venv)
    return isinstance(env, TensorVecEnv) and changed_step(env, TensorVecEnv) is None
