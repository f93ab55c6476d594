"""
The environments of gymnax in Gymnasium's registry, as ``gymnax/CartPole-v1`` and the like.

Importing this module registers them; JAX is imported when one is made. RL Zoo's commands do so for ``ppo_ext``. In a script::

    gym.make("sb3_ppo_ext.envs.tensors.gymnax_ids:gymnax/CartPole-v1")
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch as th

from sb3_ppo_ext.common.type_aliases import Arrays, Info, Kwargs
from sb3_ppo_ext.common.validation import refuse
from sb3_ppo_ext.envs.tensors.jax_functions import GYMNAX_PREFIX
from sb3_ppo_ext.envs.tensors.jax_vec_env import JaxVecEnv
from sb3_ppo_ext.envs.tensors.tensor_spaces import map_tensors

#: Ids of gymnax 0.0.9 without ``MNISTBandit-bsuite``, which needs a data set, and ``SimpleBandit-bsuite``, whose step fails
NAMES = (
    "CartPole-v1",
    "Pendulum-v1",
    "Acrobot-v1",
    "MountainCar-v0",
    "MountainCarContinuous-v0",
    "Asterix-MinAtar",
    "Breakout-MinAtar",
    "Freeway-MinAtar",
    "SpaceInvaders-MinAtar",
    "Catch-bsuite",
    "DeepSea-bsuite",
    "MemoryChain-bsuite",
    "UmbrellaChain-bsuite",
    "DiscountingChain-bsuite",
    "FourRooms-misc",
    "MetaMaze-misc",
    "PointRobot-misc",
    "BernoulliBandit-misc",
    "GaussianBandit-misc",
    "Reacher-misc",
    "Swimmer-misc",
    "Pong-misc",
)


class GymnaxEnv(gym.Env):
    """
    One copy of an environment of gymnax, for what wants an environment of Gymnasium. It is slow: many copies in a
    :class:`JaxVecEnv` take hardly more time than one.

    :param name: Id in gymnax
    :param env_params: Dictionary of changes to the parameters of gymnax
    :param render_mode: Only ``None``, because there are no images
    :raises ValueError: if an argument is not valid
    :raises ImportError: if JAX or gymnax is not installed
    """

    metadata: dict[str, object] = {"render_modes": []}  # noqa: RUF012 - as in Gymnasium

    def __init__(self, name: str, env_params: Any = None, render_mode: str | None = None):
        if render_mode is not None:
            refuse("render_mode", render_mode, "gymnax draws no images here; give None (`--no-render` in RL Zoo)")
        self.copies = JaxVecEnv(name, env_params, num_envs=1, device="cpu")
        self.observation_space, self.action_space = self.copies.observation_space, self.copies.action_space

    def reset(self, *, seed: int | None = None, options: Kwargs | None = None) -> tuple[Arrays, Info]:
        """
        :param seed: Seed of the random numbers, ``None`` to continue with them
        :param options: Not used
        :return: First observation, and no infos
        """
        super().reset(seed=seed)
        if seed is not None:
            self.copies.seed(seed)
        return map_tensors(self.copies.reset_tensors(), _first), {}

    def step(self, action: Arrays) -> tuple[Arrays, float, bool, bool, Info]:
        """
        :param action: Action
        :return: Observation, reward, whether the episode has terminated and whether it was cut off, and no infos
        """
        self.copies.step_async(np.asarray(action)[None])
        step = self.copies.step_tensors(self.copies.pending_actions())
        observation = map_tensors(step.final_observations, _first)
        return observation, step.rewards.item(), bool(step.terminated), bool(step.truncated), {}


def _first(part: th.Tensor) -> Any:
    return part[0].numpy().copy()


for _name in NAMES:
    gym.register(GYMNAX_PREFIX + _name, entry_point=f"{__name__}:GymnaxEnv", kwargs={"name": _name})
