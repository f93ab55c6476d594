"""Compare the update of an engine with that of the eager engine."""

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from support.hybrid import SPACES
from support.toys import DICT, IMAGE, VECTOR, make_toys
from torch import nn

from sb3_ppo_ext import PPOExt

SMALL = dict(n_steps=16, batch_size=8, n_epochs=2, seed=3, device="cpu")
VECTORS = spaces.Dict({"joints": VECTOR, "gear": spaces.Discrete(3)})
KEYS = dict(actor_keys=["joints"])


def make(env=None, policy="MlpPolicy", backend="native", make_env=make_toys, **options):
    return PPOExt(policy, make_env(**(env or {})), backend=backend, **{**SMALL, **options})


def relative_error(expected, actual):
    expected, actual = expected.cpu(), actual.cpu()
    return ((expected - actual).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


def updated(model, backend):
    """The model after one update by the engine, from its current rollout."""
    model.backend = backend
    np.random.seed(0)
    th.manual_seed(0)
    model.train()
    return model


def assert_same_update(rtol=1e-5, other="native", **kwargs):
    """An update from the same rollout with the same minibatches gives the same parameters, optimizer moments and logs."""
    models = []
    for backend in ("eager", other):
        model = make(**{**kwargs, "backend": "eager"})
        model.learn(SMALL["n_steps"] * model.n_envs)
        models.append(updated(model, backend))
    assert_same_results(*models, rtol)


def assert_same_results(eager, other, rtol=1e-5):
    """Parameters, optimizer moments and logs of two models are the same, to rounding."""
    actual_state = other.policy.state_dict()
    for name, expected in eager.policy.state_dict().items():
        assert relative_error(expected, actual_state[name].cpu()) < rtol, name
    moments, actual_moments = (model.policy.optimizer.state_dict()["state"] for model in (eager, other))
    assert moments.keys() == actual_moments.keys()
    for number, expected in moments.items():
        for name, value in expected.items():
            error = relative_error(th.as_tensor(value), th.as_tensor(actual_moments[number][name]).cpu())
            assert error < 10 * rtol, (number, name)
    assert eager.logger.name_to_value.keys() == other.logger.name_to_value.keys()
    for name, expected in eager.logger.name_to_value.items():
        if not name.startswith("time/"):
            assert other.logger.name_to_value[name] == pytest.approx(expected, rel=1e-3, abs=1e-5), name


UPDATES = {
    "box": {},
    "box of shape (2, 2)": dict(env=dict(action_space=spaces.Box(-1, 1, (2, 2), np.float32))),
    "box in float64": dict(env=dict(action_space=spaces.Box(-2.0, 2.0, (2,), np.float64))),
    "discrete": dict(env=dict(action_space=spaces.Discrete(4))),
    "multi-discrete": dict(env=dict(action_space=spaces.MultiDiscrete([3, 2]))),
    "multi-binary": dict(env=dict(action_space=spaces.MultiBinary(3))),
    "hybrid": dict(env=dict(action_space=SPACES["all kinds"]), ent_coef=0.1),
    "hybrid, all losses": dict(
        env=dict(action_space=SPACES["nested"]), bounds_coef=0.1, bounds_limit=0.0, kl_coef=0.5, learning_rate=1e-3
    ),
    "hybrid, Beta": dict(env=dict(action_space=SPACES["dict"]), action_dist="beta", kl_coef=0.5, ent_coef=0.1),
    "hybrid, squashed": dict(env=dict(action_space=SPACES["tuple"]), action_dist="squashed_gaussian", ent_coef=0.1),
    "hybrid, mean_tanh": dict(env=dict(action_space=SPACES["all kinds"]), policy_kwargs=dict(mean_tanh=True), ent_coef=0.1),
    "hybrid, integers": dict(env=dict(action_space=SPACES["integers"]), ent_coef=0.1, kl_coef=0.5),
    "discrete observations": dict(env=dict(observation_space=spaces.Discrete(5))),
    "multi-discrete observations": dict(env=dict(observation_space=spaces.MultiDiscrete([4, 3]))),
    "multi-binary observations": dict(env=dict(observation_space=spaces.MultiBinary(4))),
    "float64 observations": dict(env=dict(observation_space=spaces.Box(-1.0, 1.0, (3,), np.float64))),
    "observations of shape (2, 3)": dict(env=dict(observation_space=spaces.Box(-1.0, 1.0, (2, 3), np.float32))),
    "flat images": dict(env=dict(observation_space=IMAGE), rtol=1e-4),
    "dict of vectors": dict(env=dict(observation_space=VECTORS), policy="MultiInputPolicy"),
    "different keys": dict(env=dict(observation_space=VECTORS), policy="MultiInputPolicy", policy_kwargs=KEYS),
    "different keys, gSDE, V-trace, segments": dict(
        **dict(env=dict(observation_space=VECTORS), policy="MultiInputPolicy", policy_kwargs=KEYS, use_sde=True),
        **dict(vtrace=True, priority_alpha=0.6, priority_segment=4, critic_learning_rate=1e-3, ent_coef=0.1),
    ),
    "one environment": dict(env=dict(n_envs=1)),
    "a remainder": dict(batch_size=7),
    "a single sample left": dict(batch_size=31),
    "larger than the rollout": dict(batch_size=128),
    "discrete, entropy": dict(env=dict(action_space=spaces.Discrete(4)), ent_coef=0.1),
    "multi-discrete, entropy": dict(env=dict(action_space=spaces.MultiDiscrete([3, 2])), ent_coef=0.1),
    "entropy": dict(ent_coef=0.1),
    "no normalisation": dict(normalize_advantage=False, vf_coef=0.9, max_grad_norm=0.1),
    "stopped by the KL divergence": dict(target_kl=1e-4, learning_rate=1e-2),
    "values are clipped": dict(clip_range_vf=0.01, learning_rate=1e-3),
    "values are clipped, the worse counts": dict(clip_range_vf=0.001, vf_clip_mode="max", learning_rate=1e-2, rtol=1e-4),
    "all losses": dict(bounds_coef=0.1, bounds_limit=0.0, kl_coef=0.5, dual_clip=3.0, ent_coef=0.01, learning_rate=1e-3),
    "SPO": dict(surrogate="spo", learning_rate=1e-3, clip_range=0.05, rtol=1e-4),
    "dual clip": dict(dual_clip=1.01, learning_rate=1e-2, rtol=1e-4),
    "all losses, squashed": dict(action_dist="squashed_gaussian", bounds_coef=0.1, bounds_limit=0.0, kl_coef=0.5),
    "KL, Beta": dict(action_dist="beta", kl_coef=0.5, surrogate="spo"),
    "KL, discrete": dict(env=dict(action_space=spaces.Discrete(4)), kl_coef=0.5),
    "much is clipped": dict(clip_range=0.001, learning_rate=1e-3),
    "networks": dict(policy_kwargs=dict(net_arch=dict(pi=[8], vf=[16, 17]), activation_fn=nn.ReLU)),
    "ELU": dict(policy_kwargs=dict(activation_fn=nn.ELU)),
    "SiLU": dict(policy_kwargs=dict(activation_fn=nn.SiLU)),
    "GELU": dict(policy_kwargs=dict(activation_fn=nn.GELU)),
    "many layers": dict(policy_kwargs=dict(net_arch=[8] * 15)),
    "layer_norm": dict(policy_kwargs=dict(net_type="layer_norm"), rtol=1e-4),
    "simba": dict(policy_kwargs=dict(net_type="simba"), rtol=1e-4),
    "no hidden layers": dict(policy_kwargs=dict(net_arch=[])),
    "separate extractors": dict(policy_kwargs=dict(share_features_extractor=False)),
    "weight decay": dict(policy_kwargs=dict(optimizer_kwargs=dict(weight_decay=0.1))),
    "mean_tanh": dict(policy_kwargs=dict(mean_tanh=True)),
    "learn_std": dict(policy_kwargs=dict(learn_std=False, log_std_init=-1.0)),
    "squashed, entropy": dict(action_dist="squashed_gaussian", ent_coef=0.1),
    "beta, entropy": dict(action_dist="beta", ent_coef=0.1),
    "gSDE": dict(use_sde=True, ent_coef=0.1),
    "gSDE, one environment": dict(env=dict(n_envs=1), use_sde=True, sde_sample_freq=4),
    "gSDE, no hidden layers": dict(use_sde=True, policy_kwargs=dict(net_arch=[])),
    "gSDE, squashed": dict(use_sde=True, ent_coef=0.1, policy_kwargs=dict(squash_output=True, log_std_init=-2.0), rtol=1e-4),
    "gSDE, expln": dict(use_sde=True, policy_kwargs=dict(use_expln=True, full_std=False, log_std_init=0.1)),
    "gSDE, all losses": dict(use_sde=True, bounds_coef=0.1, bounds_limit=0.0, kl_coef=0.5, ent_coef=0.01, learning_rate=1e-3),
    "gSDE, V-trace, accumulated": dict(env=dict(n_envs=5), use_sde=True, vtrace=True, accumulate_grad=2, ent_coef=0.1),
    "normalised values": dict(normalize_value=True, clip_range_vf=0.1, vf_clip_mode="max", learning_rate=1e-3),
    "normalised values, different keys": dict(
        **dict(env=dict(observation_space=VECTORS), policy="MultiInputPolicy", policy_kwargs=KEYS, normalize_value=True),
        **dict(vtrace=True, priority_alpha=0.6, priority_segment=4, learning_rate=1e-3),
    ),
    "segments, EMA, V-trace": dict(priority_alpha=0.6, priority_segment=4, advantage_norm="ema", vtrace=True),
}


FUSED = {
    "gSDE": dict(use_sde=True),
    "images": dict(env=dict(observation_space=IMAGE), policy="CnnPolicy", rtol=1e-4),
    "dict": dict(env=dict(observation_space=DICT), policy="MultiInputPolicy", rtol=1e-4),
    "dict, different keys": dict(
        **dict(env=dict(observation_space=DICT), policy="MultiInputPolicy", rtol=1e-4),
        policy_kwargs=dict(actor_keys=["camera"], critic_keys=["gear", "joints"]),
    ),
    "box": {},
    "Mish": dict(policy_kwargs=dict(activation_fn=nn.Mish)),
    "max_clip_fraction": dict(max_clip_fraction=0.05, learning_rate=1e-3, clip_range=0.001),
    "accumulated": dict(accumulate_grad=2),
    "normalised values": dict(env=dict(observation_space=IMAGE), policy="CnnPolicy", rtol=1e-4, normalize_value=True),
    "KL": dict(target_kl=1e-4, learning_rate=1e-2, kl_coef=0.1),
    "Muon": dict(optimizer="muon"),
}
