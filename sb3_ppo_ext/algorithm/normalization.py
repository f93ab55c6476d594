"""Normalisation inside the model: its options, and statistics in files of ``VecNormalize``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.type_aliases import GymEnv
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize

from sb3_ppo_ext.algorithm.policy_updater import PolicyUpdater
from sb3_ppo_ext.common.guards import find_normalizers, normalized_parts
from sb3_ppo_ext.common.pickles import read_pickled
from sb3_ppo_ext.common.validation import refuse
from sb3_ppo_ext.envs.normalizer import Normalizer, normalized_keys
from sb3_ppo_ext.envs.tensors.tensor_vec_normalize import TensorVecNormalize
from sb3_ppo_ext.envs.tensors.tensor_vec_transpose_image import steps_in_tensors
from sb3_ppo_ext.policies.normalized_observations import NormalizedObservationsMixin
from sb3_ppo_ext.rollout.user_code import environments_of


class Normalization(PolicyUpdater):
    """The part of PPOExt that sets up its normalisation of observations and rewards."""

    def _setup_normalizer(self) -> None:
        """Make the statistics, or give those that exist the settings of the options. The policy shares them."""
        self._check_normalization(self.env)
        before, self.normalizer = self.normalizer, None
        if not self.normalize_obs and not self.normalize_reward:
            return
        self.normalizer = Normalizer(
            self._normalized_shapes(), self.normalize_reward, self.clip_obs, self.clip_reward, self.normalize_freq == "rollout"
        )
        if before is not None:
            self.normalizer.continue_from(before)
        self._place_normalizer()
        self._share_normalizer()

    def _share_normalizer(self) -> None:
        """Let the policy normalise what ``predict`` gets with the statistics of the model."""
        policy = getattr(self, "policy", None)
        if self.normalizer is None or not isinstance(policy, NormalizedObservationsMixin):
            return
        if self.normalizer.norm_obs or getattr(policy, "use_last_reward", False):
            policy.normalizer = self.normalizer

    def _normalized_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parts of the observations that are normalised, see :class:`Normalizer`."""
        if not self.normalize_obs:
            return {}
        space, unread = self.observation_space, [self.action_mask_key or ""]
        keys = normalized_keys(space, self.normalize_obs, unread)
        if keys is None:
            return {"": space.shape or ()}
        assert isinstance(space, spaces.Dict)
        return {key: space[key].shape or () for key in keys}

    def _place_normalizer(self) -> None:
        """Keep the statistics where the steps of the environments are."""
        if self.normalizer is not None and self.env is not None:
            env: Any = self.env
            self.normalizer.place(env.device if steps_in_tensors(env) else None)

    @property
    def _normalized_parts(self) -> list[str]:
        """Keys of the observations that are normalised, in the model or by ``VecNormalize``, which ``set_env`` can change."""
        own = [] if self.normalizer is None or not self.normalizer.norm_obs else self.normalizer.norm_obs_keys or [""]
        return sorted({*normalized_parts(self.env), *own})

    @property
    def _normalizes_integers(self) -> bool:
        """Whether the model makes floats of integers, which SB3's rollout buffer would round."""
        shapes, space = self._normalized_shapes(), self.observation_space
        parts = space.spaces if isinstance(space, spaces.Dict) else {"": space}
        return any(np.dtype(parts[key].dtype).kind != "f" for key in shapes)

    def _check_normalization(self, env: GymEnv | None) -> None:
        for name in ("normalize_obs", "normalize_reward"):
            if getattr(self, name) and isinstance(env, VecEnv) and (found := find_normalizers(env)):
                remedy = f"the environment is in a `{type(found[0]).__name__}`, which normalises, too; give it without"
                refuse(name, getattr(self, name), f"{remedy} (`load_vec_normalize` takes in its statistics)")

    def _check_evaluation(self, callback: BaseCallback) -> None:
        """Refuse observations that would be normalised twice."""
        for env in environments_of(callback) if self.normalize_obs else ():
            if any(each.norm_obs for each in find_normalizers(env)):
                remedy = "an environment of the callback is in a `VecNormalize`, and the model normalises what `predict` gets"
                refuse("normalize_obs", self.normalize_obs, f"{remedy}; give the environment without")

    def load_vec_normalize(self, vec_normalize: VecNormalize | str | Path) -> None:
        """
        Take in the statistics of a ``VecNormalize``, as those of an earlier training, for the parts of the observations that
        this model normalises. They are copied; settings such as ``clip_obs`` are the model's.

        :param vec_normalize: ``VecNormalize`` or ``TensorVecNormalize``, or the file that it was saved to, which can execute
            code, as all pickles can
        :raises ValueError: if the model does not normalise, or the statistics do not fit it
        """
        normalizer = self._own_normalizer("load_vec_normalize")
        source = vec_normalize
        if isinstance(source, str | os.PathLike):
            source = read_pickled("vec_normalize", str(source), VecNormalize)
        normalizer.take("vec_normalize", source)

    def save_vec_normalize(self, path: str | Path) -> None:
        """
        Write the statistics and the settings into a file of ``VecNormalize``, for ``VecNormalize.load(path, env)`` around
        environments of other algorithms and tools.

        :param path: Path of the file, which is replaced at once
        :raises ValueError: if the model does not normalise
        """
        normalizer = self._own_normalizer("save_vec_normalize")
        made = VecNormalize(
            DummyVecEnv([lambda: _Spaces(self.observation_space, self.action_space)]),
            norm_obs=normalizer.norm_obs,
            norm_reward=normalizer.norm_reward,
            clip_obs=normalizer.clip_obs,
            clip_reward=normalizer.clip_reward,
            gamma=self.gamma,
            epsilon=normalizer.epsilon,
            norm_obs_keys=normalizer.norm_obs_keys,
        )
        normalizer.give(made)
        # Its `save` is atomic, and its files are those of `VecNormalize`.
        TensorVecNormalize.save(made, str(path))  # type: ignore[arg-type]

    def _own_normalizer(self, method: str) -> Normalizer:
        if self.normalizer is None:
            refuse("normalize_obs", self.normalize_obs, f"`{method}` needs a model made with `normalize_obs=True`")
        return self.normalizer


class _Spaces(gym.Env):
    """An environment that has nothing but spaces."""

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space):
        self.observation_space, self.action_space = observation_space, action_space
