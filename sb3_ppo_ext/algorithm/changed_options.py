"""Options that have been changed between two calls of ``learn``."""

from collections import deque
from collections.abc import Mapping
from typing import Any

import cloudpickle
import numpy as np
import torch as th
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv

from sb3_ppo_ext.algorithm.learning_setup import SCHEDULES
from sb3_ppo_ext.algorithm.model_setup import ModelSetup
from sb3_ppo_ext.common.schedules import DecaySchedule, check_schedule, make_schedule
from sb3_ppo_ext.common.type_aliases import StateDict
from sb3_ppo_ext.common.validation import refuse
from sb3_ppo_ext.distributions import bounded_part
from sb3_ppo_ext.envs.tensors.tensor_vec_transpose_image import steps_in_tensors
from sb3_ppo_ext.options import check_options, convert_options
from sb3_ppo_ext.options.table import CHANGES
from sb3_ppo_ext.policies.actor_critic import ActionDistributionMixin

# Options that the rollout buffer has as well
OF_BUFFER = ("gamma", "gae_lambda")


class ChangedOptions(ModelSetup):
    """The part of PPOExt that lets options act, or refuses them, that were changed between two calls of ``learn``."""

    @property
    def _steps_in_tensors(self) -> bool:
        """Whether the steps of the environments are tensors, which ``set_env`` can change."""
        return self.env is not None and steps_in_tensors(self.env)

    @property
    def stats_window_size(self) -> int:
        """Number of episodes over which the logged statistics are averaged. Changes act at the next call of ``learn``."""
        return self._stats_window_size

    @stats_window_size.setter
    def stats_window_size(self, n_episodes: int) -> None:
        self._stats_window_size = n_episodes

    def _setup_learn(self, *args: Any, **kwargs: Any) -> tuple[int, BaseCallback]:
        self._apply_changed_options()
        self._choose_backend()  # Hooks and replaced methods may be new.
        total_timesteps, callback = super()._setup_learn(*args, **kwargs)
        self._check_evaluation(callback)
        for schedule in (self.lr_schedule, self.critic_lr_schedule):
            if isinstance(schedule, DecaySchedule):
                schedule.rollout = self.n_steps * self.n_envs * self.ranks.size / max(total_timesteps, 1)
        return total_timesteps, callback

    def _apply_changed_options(self) -> None:
        """Check options that have been changed since the last call of ``learn``, or refuse the change, and let them act."""
        convert_options(self)
        changed = [name for name, value in self._set_up.items() if not is_same(value, getattr(self, name))]
        for name in changed:
            if name in CHANGES and (remedy := CHANGES[name].remedy) is not None:
                refuse(name, getattr(self, name), remedy)
        self._check_environment()
        if not changed:
            return
        check_options(self, changed)
        own_schedules = {name: self._own_schedule(name) for name in SCHEDULES if name in changed}
        self._set_up.update({name: object() for name in changed})  # If a step fails, all are taken again.
        for step in dict.fromkeys(step for name in changed if name in CHANGES for step in CHANGES[name].steps):
            getattr(self, step)()
        vars(self).update(own_schedules)
        self._remember_options()

    def _check_environment(self) -> None:
        env: Any = self.env
        if env is None:
            refuse("env", None, "the model has no environment; give one to `load` or `set_env`")
        spaces_of_env = (getattr(env, "observation_space", None), getattr(env, "action_space", None))
        fits = isinstance(env, VecEnv) and env.num_envs == self.n_envs
        if not fits or spaces_of_env != (self.observation_space, self.action_space):
            remedy = "it is not like the environment that the model was made for; give it to `set_env`, or to `load`"
            refuse("env", env, remedy)
        self._check_masks()
        self._check_normalization(self.env)

    def _own_schedule(self, name: str) -> object:
        """A schedule that the user has set instead of the option, which it replaces until the option is changed."""
        value = getattr(self, name)
        if not callable(value):
            return None if value is None and name == "critic_lr_schedule" else make_schedule(name, value)
        check_schedule(name, value)
        return value

    def _remember_options(self) -> None:
        self._set_up = {name: remembered(getattr(self, name)) for name in (*CHANGES, *SCHEDULES)}

    def changes_in_training(self) -> StateDict:
        """
        :return: What a callback may have changed while ``learn`` runs, and options do not tell: schedules that replace those
            of the options, or that a later change of an option leaves as they are until the next call of ``learn``, the same
            of the rollout buffer, and parameters without a gradient
        """
        same = {
            name: is_same(self._set_up[name], getattr(self, name)) for name in (*SCHEDULES, *SCHEDULES.values(), *OF_BUFFER)
        }
        schedules = {
            name: (getattr(self, name), same[name], same[option])
            for name, option in SCHEDULES.items()
            if not (same[name] and same[option]) and getattr(self, name) is not self.adaptive_lr
        }
        buffer = self.rollout_buffer
        return {
            "schedules": cloudpickle.dumps(schedules),
            "buffer": {name: (getattr(buffer, name), same[name]) for name in OF_BUFFER if hasattr(buffer, name)},
            "fixed": [name for name, parameter in self.policy.named_parameters() if not parameter.requires_grad],
            "options": {name: cloudpickle.dumps(getattr(self, name)) for name in (*SCHEDULES.values(), *OF_BUFFER)},
        }

    def repeat_changes(self, changes: StateDict) -> None:
        """
        Repeat what a callback has changed, except where the user gives another option.

        :param changes: What :meth:`changes_in_training` has returned
        """
        kept = {name for name, value in changes["options"].items() if cloudpickle.dumps(getattr(self, name)) == value}
        for name, (schedule, is_of_option, is_old) in cloudpickle.loads(changes["schedules"]).items():
            if SCHEDULES[name] in kept:
                setattr(self, name, schedule)
                if is_of_option:
                    self._set_up[name] = schedule
                if not is_old:
                    self._set_up[SCHEDULES[name]] = object()  # It acts at the next call of `learn`.
        for name, (value, is_old) in changes["buffer"].items():
            if name in kept and value != getattr(self.rollout_buffer, name):
                setattr(self.rollout_buffer, name, value)
                if not is_old:
                    self._set_up[name] = object()
        for name, parameter in self.policy.named_parameters():
            parameter.requires_grad_(name not in changes["fixed"])

    def _setup_statistics(self) -> None:
        """Resize the buffers, which SB3 creates anew only if the timesteps are reset."""
        for name in ("ep_info_buffer", "ep_success_buffer"):
            if (episodes := getattr(self, name)) is not None:
                setattr(self, name, deque(episodes, maxlen=self._stats_window_size))

    def _setup_seed(self) -> None:
        self.set_random_seed(self.seed)

    def _setup_deterministic_action(self) -> None:
        if isinstance(self.policy, ActionDistributionMixin):
            self.policy.deterministic_action = self.deterministic_action
            if (bounded := bounded_part(self.policy.action_dist)) is not None:
                bounded.deterministic_action = self.deterministic_action


def remembered(value: object) -> object:
    """
    :param value: Value of an option
    :return: The same value, with copies of dictionaries and lists, which may be changed in place
    """
    if isinstance(value, Mapping):
        return {key: remembered(part) for key, part in value.items()}
    return [remembered(part) for part in value] if isinstance(value, list | tuple) else value


def is_same(one: object, other: object) -> bool:
    """
    :param one: Value that :func:`remembered` has returned
    :param other: Current value of the same option
    :return: Whether it has not been changed
    """
    if isinstance(other, Mapping):
        return isinstance(one, dict) and one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(other, list | tuple):
        return isinstance(one, list) and len(one) == len(other) and all(map(is_same, one, other))
    if one is other:
        return True
    if isinstance(other, np.ndarray | th.Tensor):  # comparisons of these have no truth value
        return False
    return type(one) is type(other) and bool(one == other)
