"""
Normalisation in a run of RL Zoo: ``normalize`` of the entry is what the model does, so that the run has one file. A
``VecNormalize`` around the environments remains where a run had one before, and for settings that only it has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gymnasium import spaces
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from sb3_ppo_ext.checkpoints.training_state import is_checkpoint
from sb3_ppo_ext.common.saved_models import read_attribute, read_model
from sb3_ppo_ext.common.type_aliases import Kwargs
from sb3_ppo_ext.common.validation import refuse
from sb3_ppo_ext.envs.tensors.tensor_vec_normalize import TensorVecNormalize
from sb3_ppo_ext.envs.tensors.tensor_vec_transpose_image import steps_in_tensors
from sb3_ppo_ext.envs.time_limits import AUTO, discount_for, time_limit_of_all
from sb3_ppo_ext.policies.actor_critic import normalizes
from sb3_ppo_ext.ppo_ext import PPOExt
from sb3_ppo_ext.zoo.atomic_saving import make_atomic
from sb3_ppo_ext.zoo.entry_checks import class_of
from sb3_ppo_ext.zoo.entry_normalization import KNOWN, options_of
from sb3_ppo_ext.zoo.resuming import agent_with_statistics
from sb3_ppo_ext.zoo.run_folder import RESUMED
from sb3_ppo_ext.zoo.yaml_entries import can_be_normalized, is_small_image

if TYPE_CHECKING:
    from rl_zoo3.exp_manager import ExperimentManager

# Options of the model that say what it normalises
OPTIONS = ("normalize_obs", "normalize_reward", "clip_obs", "clip_reward", "normalize_freq")
# Discount factor of the model, if the entry does not say it; otherwise the Zoo gives the same one to `VecNormalize`
DEFAULT_GAMMA = 0.99
# The trial that runs in this thread (`--n-jobs`)
TRIAL: ContextVar[Any] = ContextVar("trial", default=None)


def maybe_normalize(theirs: Callable[..., VecEnv], experiment: ExperimentManager, env: VecEnv, eval_env: bool) -> VecEnv:
    """
    Leave environments as they are if the model normalises. A ``VecNormalize`` normalises only observations that it can, unless
    the user says which. In a trial, it gets the sampled discount factor, as in a training run with the ``--trial-id`` of the
    trial. It is saved atomically. Around environments that step in tensors it does so, too. Statistics are those of the agent
    whose training is continued, if there is one.
    """
    if experiment.normalize and not {"norm_obs", "norm_obs_keys"} & experiment.normalize_kwargs.keys():
        experiment.normalize_kwargs = {**experiment.normalize_kwargs, **_normalizable(env.observation_space)}
    if experiment.frame_stack is not None:  # the Zoo's next step
        _check_stackable(experiment.frame_stack, env.observation_space)
    reason = experiment.why_wrapped = _why_wrapped(experiment, env.observation_space)  # type: ignore[attr-defined]
    if experiment.normalize and reason is None:
        return env
    if experiment.normalize_kwargs.get("gamma") == AUTO:
        experiment.normalize_kwargs = {**experiment.normalize_kwargs, "gamma": discount_for(time_limit_of_all(env))}
    agent, experiment.trained_agent = experiment.trained_agent, agent_with_statistics(experiment)
    try:
        env, trial = theirs(env, eval_env), TRIAL.get()
    finally:
        experiment.trained_agent = agent
    if type(env) is VecNormalize and steps_in_tensors(env.venv):
        env = TensorVecNormalize.of(env)
    if isinstance(env, VecNormalize):
        experiment.normalize = True  # so that it is saved, also if only the agent has it
        if trial is not None:
            env.gamma = trial.user_attrs.get("gamma", env.gamma)  # a user's own sampler may leave it out
    make_atomic([env])
    return env


def preprocess_action_noise(
    theirs: Callable[..., Kwargs],
    experiment: ExperimentManager,
    hyperparams: Kwargs,
    saved_hyperparams: Kwargs,
    env: VecEnv,
) -> Kwargs:
    """
    Give the model the options that do what ``normalize`` says, as soon as there are environments to read the observation space
    from. They are saved in its place. Options that the user gives have precedence.
    """
    hyperparams = theirs(hyperparams, saved_hyperparams, env)
    if not experiment.normalize:
        return hyperparams
    if (reason := experiment.why_wrapped) is not None:  # type: ignore[attr-defined]
        if experiment.verbose > 0:
            print(f"Normalization by `VecNormalize`, in a file of its own: {reason}")
        # `enjoy` looks there whether there are statistics, also if only the agent has them.
        saved_hyperparams["normalize"] = saved_hyperparams.get("normalize") or True
        return hyperparams
    # What `_normalizable` has left can be normalised, or is the user's wish.
    kwargs, gamma = experiment.normalize_kwargs, hyperparams.get("gamma", DEFAULT_GAMMA)
    options = _options_of_agent(experiment) or options_of(kwargs, gamma, env.observation_space, lambda part: True)
    options = {name: hyperparams.get(name, value) for name, value in options.items()}
    if experiment.verbose > 0:
        print(f"Normalization by the model: {options}")
    experiment.normalize = False
    saved_hyperparams.pop("normalize", None)
    saved_hyperparams.update(options)
    return {**hyperparams, **options}


def _why_wrapped(experiment: ExperimentManager, space: spaces.Space) -> str | None:
    """Why a run that normalises needs a ``VecNormalize``, ``None`` if the model normalises instead."""
    if not issubclass(sys.modules["rl_zoo3.utils"].ALGOS[experiment.algo], PPOExt):
        return "the algorithm is no `PPOExt`"
    if Path(agent_with_statistics(experiment)).parent.joinpath(experiment.env_name, "vecnormalize.pkl").exists():
        return "that of the trained agent"
    if RESUMED.get() is not None or (is_checkpoint(experiment.trained_agent) and not _options_of_agent(experiment)):
        return "as before the interruption"  # A run whose model normalises has saved its options instead.
    kwargs = experiment.normalize_kwargs
    if others := sorted(kwargs.keys() - set(KNOWN)):
        return f"the model has no setting `{others[0]}`"
    if "gamma" in kwargs and "gamma" not in experiment.entry and kwargs["gamma"] != DEFAULT_GAMMA:  # type: ignore[attr-defined]
        return f"the returns of the model have its own discount factor, {DEFAULT_GAMMA}"
    policy = class_of("policy", experiment.entry.get("policy"))  # type: ignore[attr-defined]
    if isinstance(policy, type) and kwargs.get("norm_obs", True) and not normalizes(policy):
        return f"the policy `{policy.__name__}` inherits none of `sb3_ppo_ext`"
    if any(map(is_image_space, _normalized_parts(kwargs, space))):
        return "the model normalises no images"
    return None


def _normalized_parts(kwargs: Kwargs, space: spaces.Space) -> list[spaces.Space]:
    if not kwargs.get("norm_obs", True):
        return []
    if not isinstance(space, spaces.Dict):
        return [space]
    return [space[key] for key in kwargs.get("norm_obs_keys") or space.spaces if key in space.spaces]


def _options_of_agent(experiment: ExperimentManager) -> Kwargs:
    """Options of the agent whose training is continued, if it normalises."""
    if not experiment.continue_training:
        return {}
    saved = read_model(experiment.trained_agent).data
    options = {name: read_attribute(saved, name) for name in OPTIONS if name in saved}
    return options if options.get("normalize_obs") or options.get("normalize_reward") else {}


def _check_stackable(frame_stack: int, space: spaces.Space) -> None:
    for part in space.values() if isinstance(space, spaces.Dict) else [space]:
        if not isinstance(part, spaces.Box):
            remedy = "give `gymnasium.wrappers.FrameStackObservation` as the first `env_wrapper` instead"
            refuse("frame_stack", frame_stack, f"SB3 stacks observations that are a Box, not {part}; {remedy}")


def _normalizable(space: spaces.Space) -> Kwargs:
    """:return: Keyword arguments for ``VecNormalize``, so that it normalizes only the observations that it can"""
    if isinstance(space, spaces.Dict):
        # Normalised, an image that is too small for SB3's network is read as a vector, as it is with `ppo`.
        keys = [key for key, part in space.spaces.items() if can_be_normalized(part) or is_small_image(part)]
        return {"norm_obs_keys": keys} if keys else {"norm_obs": False}
    return {} if can_be_normalized(space) else {"norm_obs": False}
