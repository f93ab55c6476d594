"""Small models of transformer policies."""

import numpy as np
import torch as th
from gymnasium import spaces
from support.toys import DICT, IMAGE, make_toys

from sb3_ppo_ext import PPOExt

SIZES = dict(d_model=16, n_heads=2, ffn_dim=16)
SMALL = dict(n_steps=16, batch_size=16, n_epochs=2, seed=3, device="cpu")


def make(policy="MlpTransformerPolicy", env=None, n_envs=2, context_length=6, keywords=None, **options):
    policy_kwargs = {**SIZES, "context_length": context_length, **(keywords or {})}
    return PPOExt(policy, make_toys(n_envs, **(env or {})), policy_kwargs=policy_kwargs, **{**SMALL, **options})


def loud(policy, scale=0.3):
    """Make the parameters large, so that the history shows in the outputs."""
    with th.no_grad():
        for name, parameter in policy.named_parameters():
            if "features_extractor" not in name:
                parameter.add_(th.randn_like(parameter), alpha=scale)


SETTINGS = {
    "plain": dict(),
    "two layers, gated": dict(keywords=dict(n_layers=2, gate=True)),
    "longer than a rollout": dict(context_length=23, n_steps=4, batch_size=8),
    "as long as a rollout": dict(context_length=16),
    "no history": dict(context_length=1),
    "one environment": dict(n_envs=1),
    "shared transformer": dict(keywords=dict(share_features_extractor=True)),
    "last action and reward": dict(keywords=dict(use_last_action=True, use_last_reward=True)),
    "discrete": dict(env=dict(action_space=spaces.Discrete(3)), keywords=dict(use_last_action=True)),
    "multi-discrete": dict(env=dict(action_space=spaces.MultiDiscrete([2, 3])), keywords=dict(use_last_action=True)),
    "multi-binary": dict(env=dict(action_space=spaces.MultiBinary(3)), keywords=dict(use_last_action=True)),
    "discrete observations": dict(env=dict(observation_space=spaces.Discrete(4))),
    "beta": dict(action_dist="beta", keywords=dict(use_last_action=True)),
    "squashed": dict(action_dist="squashed_gaussian", keywords=dict(use_last_reward=True)),
    "images": dict(policy="CnnTransformerPolicy", env=dict(observation_space=IMAGE), n_steps=8, batch_size=8),
    "dictionaries": dict(policy="MultiInputTransformerPolicy", env=dict(observation_space=DICT), n_steps=8, batch_size=8),
    "gSDE": dict(use_sde=True),
}


def evaluated(model):
    """Values and log probabilities as the update computes them, shape ``(n_steps, n_envs)``."""
    buffer, n_envs = model.rollout_buffer, model.n_envs
    data = buffer._get_samples(np.arange(buffer.buffer_size * n_envs))
    actions = data.actions.long().flatten() if isinstance(model.action_space, spaces.Discrete) else data.actions
    with th.no_grad():
        values, log_probs, _ = model.policy.evaluate_actions(data.observations, actions)
    return [x.reshape(n_envs, -1).T.cpu().numpy() for x in (values, log_probs)]
