"""Recurrent policies: PPOExt without options is RecurrentPPO of sb3-contrib, to the bit; other engines compute the same."""

import warnings

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from sb3_contrib import RecurrentPPO
from support.engines import assert_same_update
from support.parity import assert_equal, assert_equal_runs, train
from support.toys import DICT, IMAGE, ToyEnv, make_toys

from sb3_ppo_ext import PPOExt

SIZES = dict(lstm_hidden_size=8, net_arch=[8])
SMALL = dict(n_steps=16, batch_size=8, n_epochs=3, seed=3, device="cpu")


class Case:
    def __init__(self, env=None, policy="MlpLstmPolicy", timesteps=96, stop_at=None, keywords=None, **options):
        self.env, self.policy, self.timesteps, self.stop_at = env or {}, policy, timesteps, stop_at
        self.options = {**SMALL, "policy_kwargs": {**SIZES, **(keywords or {})}, **options}

    def make(self, algorithm, **options):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You have specified a mini-batch size")
            reference = dict(backend="eager") if algorithm is PPOExt else {}
            return algorithm(self.policy, make_toys(**self.env), **{**self.options, **reference, **options})

    def run(self, algorithm):
        return train(self.make(algorithm), self.timesteps, self.stop_at)


CASES = {
    "box": Case(),
    "box of shape (2, 2)": Case(dict(action_space=spaces.Box(-1, 1, (2, 2), np.float32))),
    "box in float64": Case(dict(action_space=spaces.Box(-2.0, 2.0, (2,), np.float64))),
    "discrete": Case(dict(action_space=spaces.Discrete(4))),
    "multi-discrete": Case(dict(action_space=spaces.MultiDiscrete([3, 2]))),
    "discrete observations": Case(dict(observation_space=spaces.Discrete(5))),
    "multi-binary observations": Case(dict(observation_space=spaces.MultiBinary(4))),
    "float64 observations": Case(dict(observation_space=spaces.Box(-1.0, 1.0, (3,), np.float64))),
    "images": Case(dict(observation_space=IMAGE), "CnnLstmPolicy", timesteps=64),
    "dict": Case(dict(observation_space=DICT), "MultiInputLstmPolicy", timesteps=64),
    "one environment": Case(dict(n_envs=1)),
    "five environments, truncated together": Case(dict(n_envs=5, p_end=0.0)),
    "never truncated": Case(dict(length=10**6, p_end=0.2)),
    "never ended": Case(dict(length=10**6, p_end=0.0)),
    "two layers": Case(keywords=dict(n_lstm_layers=2)),
    "shared": Case(keywords=dict(shared_lstm=True, enable_critic_lstm=False)),
    "critic without memory": Case(keywords=dict(enable_critic_lstm=False)),
    "shared, two layers": Case(keywords=dict(shared_lstm=True, enable_critic_lstm=False, n_lstm_layers=2)),
    "separate extractors": Case(keywords=dict(share_features_extractor=False)),
    "separate extractors, images": Case(
        dict(observation_space=IMAGE), "CnnLstmPolicy", timesteps=64, keywords=dict(share_features_extractor=False)
    ),
    "without biases": Case(keywords=dict(lstm_kwargs=dict(bias=False))),
    "dropout": Case(keywords=dict(n_lstm_layers=2, lstm_kwargs=dict(dropout=0.3))),
    "no hidden layers": Case(keywords=dict(net_arch=[])),
    "larger": Case(dict(n_envs=3), n_steps=32, batch_size=24, timesteps=192, policy_kwargs=dict(lstm_hidden_size=64)),
    "a remainder": Case(batch_size=7),
    "larger than the rollout": Case(batch_size=128),
    "gSDE": Case(use_sde=True, sde_sample_freq=4),
    "entropy": Case(ent_coef=0.02, vf_coef=0.9, max_grad_norm=0.1),
    "multi-discrete, entropy": Case(dict(action_space=spaces.MultiDiscrete([3, 2])), ent_coef=0.1),
    "values are clipped": Case(clip_range_vf=0.1, vf_coef=0.7),
    "target_kl": Case(target_kl=1e-4, learning_rate=1e-2),
    "normalize_advantage=False": Case(normalize_advantage=False, batch_size=1, n_epochs=1),
    "stopped by a callback": Case(stop_at=20),
    "SGD": Case(keywords=dict(optimizer_class=th.optim.SGD)),
}


@pytest.mark.parametrize("name", CASES)
def test_equal_to_recurrent_ppo(name):
    """Parameters, optimiser, rollouts, logs and states are those of RecurrentPPO, to the bit."""
    case = CASES[name]
    expected, actual = case.run(RecurrentPPO), case.run(PPOExt)
    assert_equal_runs(expected, actual)
    assert_equal([*expected.model._last_lstm_states], [*actual.model._last_lstm_states], "states")


def test_toys_are_truncated():
    """The environments of these tests have episodes that are truncated, which both algorithms bootstrap."""
    env = ToyEnv()
    env.reset(seed=0)
    assert any(env.step(env.action_space.sample())[3] for _ in range(7))


# Engines

GRU = dict(rnn="gru")
LSTM = dict(policy="MlpLstmPolicy", policy_kwargs=SIZES, rtol=1e-4)


def of(env=None, keywords=None, **options):
    return {**LSTM, "env": env, "policy_kwargs": {**SIZES, **(keywords or {})}, **options}


UPDATES = {
    "box": of(),
    "discrete": of(dict(action_space=spaces.Discrete(4)), ent_coef=0.1),
    "multi-binary": of(dict(action_space=spaces.MultiBinary(3))),
    "multi-discrete observations": of(dict(observation_space=spaces.MultiDiscrete([4, 3]))),
    "box in float64": of(dict(action_space=spaces.Box(-2.0, 2.0, (2,), np.float64))),
    "images": of(dict(observation_space=IMAGE), policy="CnnLstmPolicy"),
    "dict": of(dict(observation_space=DICT), policy="MultiInputLstmPolicy"),
    "one environment": of(dict(n_envs=1)),
    "never ended": of(dict(length=10**6, p_end=0.0)),
    "a remainder": of(batch_size=7),
    "two layers": of(keywords=dict(n_lstm_layers=2)),
    "shared": of(keywords=dict(shared_lstm=True, enable_critic_lstm=False)),
    "critic without memory": of(keywords=dict(enable_critic_lstm=False)),
    "GRU": of(keywords=GRU),
    "GRU, two layers, shared": of(keywords=dict(GRU, n_lstm_layers=2, shared_lstm=True, enable_critic_lstm=False)),
    "gSDE": of(use_sde=True, ent_coef=0.1),
    "Beta, KL": of(action_dist="beta", kl_coef=0.5, ent_coef=0.1),
    "squashed, bounds": of(action_dist="squashed_gaussian", bounds_coef=0.1, bounds_limit=0.0, kl_coef=0.5),
    "all losses": of(bounds_coef=0.1, bounds_limit=0.0, kl_coef=0.5, dual_clip=3.0, ent_coef=0.01, clip_range_vf=0.1),
    "SPO": of(surrogate="spo", learning_rate=1e-3, clip_range=0.05),
    "segments, EMA, V-trace": of(priority_alpha=0.6, priority_segment=4, advantage_norm="ema", vtrace=True),
    "Muon, own critic": of(optimizer="muon", critic_learning_rate=1e-3, rtol=1e-3),
    "accumulated": of(accumulate_grad=2, batch_size=5),
    "max_clip_fraction": of(max_clip_fraction=0.05, learning_rate=1e-3, clip_range=0.001),
}


@pytest.mark.parametrize("name", UPDATES)
def test_fused_updates(name):
    """From the same rollout, the fused engine, which packs sequences, makes the update of the eager one, which pads them."""
    assert_same_update(other="fused", **UPDATES[name])
