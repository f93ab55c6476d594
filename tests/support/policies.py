"""Small models of each action distribution, and policies without an algorithm."""

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.utils import ConstantSchedule
from support.toys import BOX_ACTION, DICT, VECTOR, make_toys

from sb3_ppo_ext import CnnPolicy, MlpPolicy, MultiInputPolicy, PPOExt

BOUNDED = ["squashed_gaussian", "beta"]


SMALL = dict(n_steps=16, batch_size=8, n_epochs=2, seed=0, device="cpu", policy_kwargs=dict(net_arch=[8, 8]))


SCHEDULE = ConstantSchedule(3e-4)


# Without an algorithm, a policy gets images with the channels first.
CHANNELS_FIRST = spaces.Box(0, 255, (1, 36, 36), np.uint8)


DICTIONARY = spaces.Dict({**DICT.spaces, "camera": CHANNELS_FIRST})


POLICIES = [(MlpPolicy, VECTOR), (CnnPolicy, CHANNELS_FIRST), (MultiInputPolicy, DICTIONARY)]


def make(action_dist="gaussian", action_space=BOX_ACTION, env=None, policy="MlpPolicy", policy_kwargs=None, **options):
    policy_kwargs = {**SMALL["policy_kwargs"], **(policy_kwargs or {})}
    env = env or make_toys(action_space=action_space)
    return PPOExt(policy, env, action_dist=action_dist, **{**SMALL, **options, "policy_kwargs": policy_kwargs})


def saturate(policy, size):
    """Make the outputs of the output layer about this large, of either sign, and dependent on the observation."""
    layer = policy.action_net
    with th.no_grad():
        layer.weight.normal_(0.0, size / 10)
        # The first half of the outputs for a Beta distribution is for alpha.
        signs = th.tensor([1.0, -1.0]).repeat(len(layer.bias))[: policy.action_dist.action_dim]
        layer.bias.copy_(size * th.cat([signs, -signs])[: len(layer.bias)])
