"""The options that the tests cover, with their values, needs and conflicts."""

import copy
import inspect
import random
from collections.abc import Mapping

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecNormalize
from support.engines import VECTORS
from support.masks import make_masked
from support.parity import assert_equal
from support.toys import BOX_ACTION, VECTOR, make_toys
from support.zips import Zip

from sb3_ppo_ext import ActionMaskWrapper, PPOExt
from sb3_ppo_ext.options import ALL_OPTIONS, OWN_OPTIONS
from sb3_ppo_ext.options.reference import needed_by

SMALL = dict(n_steps=8, batch_size=8, n_epochs=2, seed=3, device="cpu", policy_kwargs=dict(net_arch=[8, 8]))

# Values that have an effect on the toy environments, where the example of the documentation hardly has one.
TOY_VALUES = {
    "adv_min_std": [0.5],
    "adv_clip": [1.0],
    "bounds_limit": [0.0],
    "priority_segment": [2],
    "lr_warmup": [0.3],
    "max_clip_fraction": [0.05],
    "accumulate_grad": [3],
    "max_grad_norm": [0.01],
    "backend": ["eager", "fused", "native", "device"],  # "compile" takes seconds: see tests/engines/test_compiled.py
}
# Options of SB3 that interact with ours
OF_SB3 = ("ent_coef", "clip_range_vf", "target_kl", "normalize_advantage", "use_sde", "max_grad_norm")
# Each option with values other than its default, and the options that it needs
VALUES = {name: list(ALL_OPTIONS[name].examples) for name in (*OWN_OPTIONS, *OF_SB3)} | TOY_VALUES
NEEDS = {name: needed_by(ALL_OPTIONS[name]) for name in VALUES}
# Policies with a memory, and one whose critic reads more than the actor, as if they were an option
WITH_POLICIES = VALUES | {"policy": ["MlpLstmPolicy", "MlpTransformerPolicy", "MultiInputPolicy"]}
NEEDS["policy"] = {}
POLICY_KWARGS = {
    "MlpPolicy": {},
    "MlpLstmPolicy": dict(lstm_hidden_size=4),
    "MlpTransformerPolicy": dict(context_length=3, n_stacked=1, d_model=4, n_heads=1),
    "MultiInputPolicy": dict(actor_keys=["joints"]),
}


def with_needs(options):
    """The options together with those that they need, unless these are given."""
    needed = {key: value for name in options for key, value in NEEDS[name].items()}
    return {**needed, **options}


# Options that need environments of their own
OF_MASKS = ("action_masking", "action_mask_key")
SINGLE = [with_needs({name: value}) for name, values in VALUES.items() if name not in OF_MASKS for value in values]
MASKED = [with_needs({name: value}) for name in OF_MASKS for value in VALUES[name]]


def is_legal(options, action_space):
    """Whether the options can be combined, written down independently of the table."""
    get = {**DEFAULTS, **options}.get
    is_hybrid = isinstance(action_space, spaces.Dict | spaces.Tuple)
    parts = action_space.spaces if is_hybrid else {"": action_space}
    box = any(isinstance(part, spaces.Box) for part in (parts.values() if isinstance(parts, Mapping) else parts))
    return not (
        (get("bounds_coef") > 0 and not box)
        or (get("use_sde") and not isinstance(action_space, spaces.Box))
        or (get("action_masking") and (box or is_hybrid))
        or (get("action_mask_key") and not get("action_masking"))
        or (get("action_dist") != "gaussian" and (not box or get("use_sde")))
        or (get("action_dist") == "beta" and get("bounds_coef") > 0)
        or (get("noise_color") > 0 and (not box or get("use_sde") or get("action_dist") == "beta"))
        or (get("action_dist") == "squashed_gaussian" and get("deterministic_action") == "mode")
        or (get("dual_clip") and get("surrogate") != "clip")
        or (get("policy") in ("MlpLstmPolicy", "MlpTransformerPolicy") and get("backend") == "native")
        or (get("amp_dtype") and get("backend") not in ("auto", "device"))
        or (get("auxiliary_losses") and get("backend") == "native")
        or (get("adaptive_lr_kl") and (get("lr_decay") != "constant" or get("lr_warmup") > 0))
        or (isinstance(get("learning_rate"), str) and (get("adaptive_lr_kl") or get("lr_decay") != "constant"))
    )


def in_few_sets(sets_of_options):
    """All options of the sets in fewer sets, each of which can be trained with a box of actions if its parts can."""
    few = []
    for options in sets_of_options:
        fits = (each for each in few if not options.keys() & each.keys() and is_legal(each | options, BOX_ACTION))
        if (found := next(fits, None)) is None:
            few.append(dict(options))
        else:
            found |= options
    return few


def own_options():
    """Names and defaults of the keyword-only arguments."""
    parameters = inspect.signature(PPOExt.__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


DEFAULTS = own_options() | dict(use_sde=False, policy="MlpPolicy")


def make(options, action_space=None, env=None):
    options = {**SMALL, **options}
    env = env or make_env(options, action_space)
    policy = options.pop("policy", "MlpPolicy")
    options["policy_kwargs"] = {**options["policy_kwargs"], **POLICY_KWARGS[policy]}
    return PPOExt(policy, env, **options)


def make_env(options, action_space=None):
    spaces_of_env = dict(observation_space=VECTORS if options.get("policy") == "MultiInputPolicy" else VECTOR)
    if not options.get("action_masking") or not isinstance(action_space, spaces.Discrete | None):
        return make_toys(action_space=action_space or BOX_ACTION, length=5, **spaces_of_env)
    wrapper = ActionMaskWrapper if options.get("action_mask_key") else None
    return make_masked(action_space=action_space or spaces.Discrete(3), length=5, wrapper=wrapper, **spaces_of_env)


def random_state():
    return random.getstate(), np.random.get_state(), th.get_rng_state()


def set_random_state(state):
    random.setstate(state[0])
    np.random.set_state(state[1])
    th.set_rng_state(state[2])


def assert_continues(options, action_space=None):
    """Train, save, load, train equals train straight through; and training is reproducible and finite."""
    straight, again = (make(options, action_space).learn(32) for _ in range(2))
    assert_equal(straight.policy.state_dict(), again.policy.state_dict(), "policy")
    assert_trains_on(straight, has_memory=options.get("policy", "MlpPolicy") != "MlpPolicy")


def assert_trains_on(straight, has_memory=False):
    """
    What a zip of a trained model is loaded to trains on as the model itself, with finite numbers.

    :param has_memory: Whether the policy remembers something of an episode, which zips do not have
    """
    saved, env, state = Zip(straight), copied(straight.env), random_state()
    if has_memory:
        straight.set_env(straight.env)
        straight.env.seed(SMALL["seed"])  # as `load` does
    straight.learn(16, reset_num_timesteps=False)
    loaded = saved.load(env=env, force_reset=has_memory, device=straight.device)
    set_random_state(state)
    loaded.learn(16, reset_num_timesteps=False)
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


def copied(env):
    """A copy of environments as they are at this moment."""
    twin = copy.deepcopy(env)
    if isinstance(env, VecNormalize):  # whose copies have no environment, and begin new episodes
        twin.set_venv(copied(env.venv))
        twin.returns = env.returns.copy()
    return twin
