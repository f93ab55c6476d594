"""The options that the tests go through, and what holds for each of them."""

import copy
import inspect
import io
import random

import numpy as np
import torch as th
from gymnasium import spaces
from support.parity import assert_equal
from support.toys import BOX_ACTION, make_toys

from sb3_ppo_ext import PPOExt

SMALL = dict(n_steps=8, batch_size=8, n_epochs=2, seed=3, device="cpu", policy_kwargs=dict(net_arch=[8, 8]))

# Each of our options with the values that are not its default, and what it needs beside it.
VALUES = {
    "action_dist": ["squashed_gaussian", "beta"],
    "deterministic_action": ["mode"],
    "advantage_norm": ["rollout", "ema"],
    "adv_ema_alpha": [0.5],
    "adv_ema_warm_start": [False],
    "adv_min_std": [0.5],
    "adv_clip": [1.0],
    "adv_shift_mean": [False],
    "bounds_coef": [0.1],
    "bounds_limit": [0.0],
    "vf_clip_mode": ["max"],
    "surrogate": ["spo"],
    "dual_clip": [3.0],
    "kl_coef": [0.5],
    "kl_target": [0.01],
    "ent_coef": ["lin_0.01"],
    "vtrace": [True],
    "vtrace_rho": [0.9],
    "vtrace_c": [0.9],
    "priority_alpha": [0.6],
    "priority_beta": [0.9],
    "priority_segment": [2],
    "optimizer": ["adamw", "sgd", "muon"],
    "weight_decay": [0.01],
    "critic_learning_rate": [1e-3],
    "lr_decay": ["linear", "cosine"],
    "lr_min_fraction": [0.5],
    "lr_warmup": [0.3],
    "adaptive_lr_kl": [0.01],
    "adaptive_lr_bounds": [(1e-4, 1e-3)],
    "max_clip_fraction": [0.05],
    "accumulate_grad": [3],
    "bad_gradients": ["skip"],
    "backend": ["eager", "fused", "native"],
    # SB3's, which meet ours
    "clip_range_vf": [0.1],
    "target_kl": [0.01],
    "normalize_advantage": [False],
    "use_sde": [True],
    "max_grad_norm": [0.01],
}
NEEDS = {
    "deterministic_action": dict(action_dist="beta"),
    "adv_ema_alpha": dict(advantage_norm="ema"),
    "adv_ema_warm_start": dict(advantage_norm="ema"),
    "adv_min_std": dict(advantage_norm="ema"),
    "adv_clip": dict(advantage_norm="ema"),
    "adv_shift_mean": dict(advantage_norm="ema"),
    "bounds_limit": dict(bounds_coef=0.1),
    "vf_clip_mode": dict(clip_range_vf=0.1),
    "kl_target": dict(kl_coef=0.5),
    "vtrace_rho": dict(vtrace=True),
    "vtrace_c": dict(vtrace=True),
    "priority_beta": dict(priority_alpha=0.6),
    "priority_segment": dict(priority_alpha=0.6),
    "lr_min_fraction": dict(lr_decay="linear"),
    "adaptive_lr_bounds": dict(adaptive_lr_kl=0.01),
}
SINGLE = [{**NEEDS.get(name, {}), name: value} for name, values in VALUES.items() for value in values]


def is_legal(options, action_space):
    """What is refused, written down once more."""
    get = {**DEFAULTS, **options}.get
    box = isinstance(action_space, spaces.Box)
    return not (
        (get("bounds_coef") > 0 and not box)
        or (get("use_sde") and not box)
        or (get("action_dist") != "gaussian" and (not box or get("use_sde")))
        or (get("action_dist") == "beta" and get("bounds_coef") > 0)
        or (get("action_dist") == "squashed_gaussian" and get("deterministic_action") == "mode")
        or (get("dual_clip") and get("surrogate") == "spo")
        or (get("kl_target") and not get("kl_coef"))
        or (get("adaptive_lr_kl") and (get("lr_decay") != "constant" or get("lr_warmup") > 0))
    )


def own_options():
    """Names and defaults of the keyword-only arguments."""
    parameters = inspect.signature(PPOExt.__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


DEFAULTS = own_options() | dict(use_sde=False)


def make(options, action_space=BOX_ACTION, env=None):
    return PPOExt("MlpPolicy", env or make_toys(action_space=action_space, length=5), **{**SMALL, **options})


def random_state():
    return random.getstate(), np.random.get_state(), th.get_rng_state()


def set_random_state(state):
    random.setstate(state[0])
    np.random.set_state(state[1])
    th.set_rng_state(state[2])


def assert_continues(options, action_space=BOX_ACTION):
    """Train, save, load, train equals train straight through; and training is reproducible and finite."""
    straight = make(options, action_space).learn(32)
    again = make(options, action_space).learn(32)
    assert_equal(straight.policy.state_dict(), again.policy.state_dict(), "policy")
    file, env, state = io.BytesIO(), copy.deepcopy(straight.env), random_state()
    straight.save(file)
    straight.learn(32, reset_num_timesteps=False)
    loaded = PPOExt.load(io.BytesIO(file.getvalue()), env=env, force_reset=False, device="cpu")
    set_random_state(state)
    loaded.learn(32, reset_num_timesteps=False)
    for name, (expected, actual) in {
        "policy": (straight.policy.state_dict(), loaded.policy.state_dict()),
        "optimizer": (straight.policy.optimizer.state_dict(), loaded.policy.optimizer.state_dict()),
        "log": tuple({k: v for k, v in m.logger.name_to_value.items() if "seconds" not in k} for m in (straight, loaded)),
    }.items():
        assert_equal(expected, actual, name)
    for name in ("advantage_normalizer", "kl_coefficient", "adaptive_lr"):
        one, other = getattr(straight, name), getattr(loaded, name)
        assert one is other is None or one.state_dict() == other.state_dict()
    assert all(np.isfinite(value) for name, value in straight.logger.name_to_value.items())
    assert all(th.isfinite(parameter).all() for parameter in straight.policy.parameters())
