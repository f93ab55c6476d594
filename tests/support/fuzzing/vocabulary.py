"""The words of the programs that `drawing` makes: what `from support.fuzzing.vocabulary import *` gives a reproduction."""

# ruff: noqa: F401 - the imports are for programs

import copy
import io
import math
import warnings
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import cloudpickle
import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.buffers import DictRolloutBuffer, ReplayBuffer, RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import ActorCriticPolicy, MultiInputActorCriticPolicy
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor, NatureCNN
from stable_baselines3.common.vec_env import DummyVecEnv
from support.fuzzing.environments import contains, make_env
from support.hybrid import equal
from support.toys import record_log
from support.zips import Zip
from torch import nn

from sb3_ppo_ext import (
    CnnPolicy,
    CnnTransformerPolicy,
    MlpPolicy,
    MlpTransformerPolicy,
    MultiInputPolicy,
    MultiInputTransformerPolicy,
    PPOExt,
    TrainingCheckpoint,
    TransformerExtractor,
)
from sb3_ppo_ext.common.observations import map_observations

__all__ = [name for name in dir() if not name.startswith("_")]
__all__ += ["OwnBuffer", "OwnModel", "OwnPolicy", "ReadAll"]
__all__ += ["act", "copied", "finite", "learn", "pickled", "policy_reloaded", "reloaded", "resumed"]

# NaN where all returns are the same, as in SB3
MAYBE_NAN = "train/explained_variance"


class Broken(AssertionError):
    """Something that the package promises does not hold."""


class OwnPolicy(MlpPolicy):
    """A user's policy."""


class OwnModel(PPOExt):
    """A user's algorithm, whose additional loss counts."""

    def extra_actor_loss(self, rollout_data, distribution):
        return 1e-3 * distribution.log_prob(rollout_data.actions).mean(), {"own": 1.0}


class OwnBuffer(RolloutBuffer):
    """A user's buffer."""


class ReadAll(BaseCallback):
    """A user's callback, which reads what SB3 offers, and stops the training at a step."""

    def __init__(self, stop_at=None):
        super().__init__()
        self.stop_at = stop_at

    def _on_step(self):
        for name in ("values", "log_probs", "actions", "clipped_actions", "new_obs", "rewards", "infos", "dones"):
            assert self.locals[name] is not None, name
        return self.n_calls != self.stop_at


def learn(model, total_timesteps, **kwargs):
    """Train, and check that everything that was learned and logged is finite."""
    log = record_log(model)
    model.learn(total_timesteps, **kwargs)
    finite(model)
    for dump in (*log.dumps, model.logger.name_to_value):
        for name, value in dump.items():
            if not _may_be_logged(model, name, value):
                raise Broken(f"logged {name}: {value}")


def _may_be_logged(model, name, value):
    if not isinstance(value, float | np.floating) or math.isfinite(value) or name.startswith("train/clip_range"):
        return True  # An infinite range is a legal one.
    # There is nothing to measure where all steps were skipped.
    return math.isnan(value) and (name == MAYBE_NAN or model.n_skipped_updates > 0)


def finite(model):
    """Check that all parameters and the state of the optimiser are finite."""
    bad = [name for name, value in model.policy.state_dict().items() if not th.isfinite(value).all()]
    # A huge penalty overflows when Adam squares it.
    states = model.policy.optimizer.state_dict()["state"].values() if model.weight_decay < 1e6 else ()
    for state in states:
        bad += [name for name, value in state.items() if isinstance(value, th.Tensor) and not th.isfinite(value).all()]
    if bad:
        raise Broken(f"not finite: {', '.join(bad)}")


def act(model, deterministic=True, n=3):
    """Actions of successive steps, which must be in the action space."""
    space, memory, actions = copy.deepcopy(model.observation_space), None, []
    space.seed(0)
    for _ in range(n):
        observation = map_observations(
            lambda part: np.clip(part, -1e6, 1e6) if part.dtype.kind == "f" else part, space.sample()
        )
        action, memory = model.predict(observation, memory, deterministic=deterministic)
        if not contains(model.action_space, action):
            raise Broken(f"{action!r} ({getattr(action, 'dtype', None)}) is not in {model.action_space}")
        memory = memory.with_rewards(np.zeros(1)) if hasattr(memory, "with_rewards") else memory
        actions.append(action)
    return actions


def _same_actions(model, other, what):
    for expected, actual in zip(act(model), act(other), strict=True):
        if not equal(expected, actual):
            raise Broken(f"{what} acts differently: {expected} became {actual}")
    return other


def _same_parameters(model, other, what):
    after = other.policy.state_dict()
    for name, value in model.policy.state_dict().items():
        if not th.equal(value, after[name]):
            raise Broken(f"{what} has another {name}")
    return other


def reloaded(model, env=None, **options):
    """Save and load. Without options, nothing has changed."""
    loaded = Zip(model).load(type(model), env=env, **{"device": "cpu", **options})
    if options.keys() <= {"device", "trusted", "custom_objects", "force_reset"}:
        _same_parameters(model, loaded, "the loaded model")
        _same_actions(model, loaded, "the loaded model")
        if (loaded.num_timesteps, loaded._n_updates) != (model.num_timesteps, model._n_updates):
            raise Broken("the loaded model has other counters")
    return loaded


def copied(model, copy_of=copy.deepcopy):
    """A deep copy, as far as SB3's models can be copied: without environment and logger."""
    # An update leaves tensors with gradients in SB3's distributions, which cannot be copied.
    act(model)
    if model.use_sde:
        with th.no_grad():
            model.policy.reset_noise()
    one = copy.copy(model)
    one.env = one._vec_normalize_env = one._logger = None
    other = copy_of(one)
    other.env, other._vec_normalize_env = model.env, model._vec_normalize_env
    return _same_actions(model, other, "the copy")


def pickled(model):
    """The model after pickling and unpickling."""
    return copied(model, lambda one: cloudpickle.loads(cloudpickle.dumps(one)))


def resumed(model, env):
    """
    The model after a training that was interrupted, which must be equal to the bit to one that was not.

    :param env: New environments for the interrupted training
    """
    total = 3 * model.n_steps * model.n_envs
    with TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        learn(model, total, callback=TrainingCheckpoint(1, folder, keep=None))
        first = min(Path(folder).iterdir(), key=lambda path: path.stat().st_mtime_ns)
        other = type(model).resume(first, env, device="cpu")
        learn(other, total, callback=TrainingCheckpoint(1, f"{folder}/other"))
    if any("will start with a reset" in str(each.message) for each in caught):
        return other
    return _same_actions(model, _same_parameters(model, other, "the resumed model"), "the resumed model")


def policy_reloaded(model):
    """Save and load the policy alone. SB3's own policies forget in the file that actor and critic share no extractor."""
    if not model.policy.share_features_extractor and type(model.policy).__module__.startswith("stable_baselines3"):
        return model
    file = io.BytesIO()
    model.policy.save(file)
    file.seek(0)
    policy = type(model.policy).load(file)
    for name, value in model.policy.state_dict().items():
        if not th.equal(value, policy.state_dict()[name]):
            raise Broken(f"the loaded policy has another {name}")
    return model
