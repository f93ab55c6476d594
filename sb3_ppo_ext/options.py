"""Which values each option of PPOExt takes, and which options do not go together: all of it in one place."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer

from sb3_ppo_ext.common.schedules import is_constant, make_schedule, value_of
from sb3_ppo_ext.common.validation import (
    check_choice,
    check_dictionary,
    check_kwargs,
    check_number,
    check_type,
    keywords_of,
    refuse,
)
from sb3_ppo_ext.distributions import ACTION_DISTS
from sb3_ppo_ext.engines.registry import ENGINES
from sb3_ppo_ext.memory.policies import TransformerPolicyMixin
from sb3_ppo_ext.policies.actor_critic import ActionDistributionMixin, check_action_distribution, with_action_distributions
from sb3_ppo_ext.update.optimizers import OPTIMIZERS
from sb3_ppo_ext.update.rollout import knows_indices

Check = Callable[[str, Any], None]


def _number(low: float = -math.inf, high: float = math.inf, **kwargs: Any) -> Check:
    return lambda name, value: check_number(name, value, low, high, **kwargs)


def _schedule(**kwargs: Any) -> Check:
    def check(name: str, value: Any) -> None:
        make_schedule(name, value, **kwargs)

    return check


def _choice(*choices: str) -> Check:
    return partial(check_choice, choices=choices)


def _optional(check: Check) -> Check:
    def check_if_given(name: str, value: Any) -> None:
        if value is not None:
            check(name, value)

    return check_if_given


def _flag(name: str, value: Any) -> None:
    check_type(name, value, (bool, np.bool_), "give True or False")


def _flag_as_sb3(name: str, value: Any) -> None:
    check_type(name, value, (bool, int, np.bool_, type(None)), "give True or False")


def _bounds(name: str, value: Any) -> None:
    remedy = "give the least and the largest learning rate, such as (1e-5, 1e-2)"
    check_type(name, value, (tuple, list), remedy)
    if len(value) != 2:
        refuse(name, value, remedy)
    check_number(f"{name}[0]", value[0], 0, open_low=True)
    check_number(f"{name}[1]", value[1], value[0])


_COUNT = _number(1, integer=True)
_FRACTION = _number(0, 1)
_NOT_NEGATIVE = _number(0)
_POSITIVE = _number(0, open_low=True)

CHECKS: dict[str, Check] = {
    # SB3's
    "n_steps": _COUNT,
    "batch_size": _COUNT,
    "n_epochs": _COUNT,
    "gamma": _FRACTION,
    "gae_lambda": _FRACTION,
    "learning_rate": _schedule(),
    "clip_range": _schedule(infinite=True),
    "clip_range_vf": _optional(_schedule(positive=True, infinite=True)),
    "ent_coef": _schedule(),
    "vf_coef": _NOT_NEGATIVE,
    "max_grad_norm": _number(0, infinite=True),
    "target_kl": _optional(_number(0, infinite=True)),
    "seed": _optional(_number(0, 2**32 - 1, integer=True)),
    "_stats_window_size": _optional(_number(0, integer=True)),
    "normalize_advantage": _flag_as_sb3,
    "use_sde": _flag_as_sb3,
    "policy_kwargs": check_dictionary,
    # Ours
    "action_dist": _choice(*ACTION_DISTS),
    "deterministic_action": _choice("mean", "mode"),
    "advantage_norm": _choice("minibatch", "rollout", "ema"),
    "adv_ema_alpha": _number(0, 1, open_low=True),
    "adv_ema_warm_start": _flag,
    "adv_min_std": _POSITIVE,
    "adv_clip": _number(0, open_low=True, infinite=True),
    "adv_shift_mean": _flag,
    "bounds_coef": _NOT_NEGATIVE,
    "bounds_limit": _NOT_NEGATIVE,
    "vf_clip_mode": _choice("clip", "max"),
    "surrogate": _choice("clip", "spo"),
    "dual_clip": _optional(_number(1, open_low=True)),
    "kl_coef": _NOT_NEGATIVE,
    "kl_target": _optional(_POSITIVE),
    "vtrace": _flag,
    "vtrace_rho": _number(0, open_low=True, infinite=True),
    "vtrace_c": _number(0, infinite=True),
    "priority_alpha": _NOT_NEGATIVE,
    "priority_beta": _FRACTION,
    "priority_segment": _COUNT,
    "optimizer": _choice("adam", *OPTIMIZERS, "muon"),
    "weight_decay": _NOT_NEGATIVE,
    "critic_learning_rate": _optional(_schedule()),
    "lr_decay": _choice("constant", "linear", "cosine"),
    "lr_min_fraction": _FRACTION,
    "lr_warmup": _FRACTION,
    "adaptive_lr_kl": _optional(_POSITIVE),
    "adaptive_lr_bounds": _bounds,
    "max_clip_fraction": _optional(_FRACTION),
    "accumulate_grad": _COUNT,
    "bad_gradients": _choice("raise", "skip"),
    "backend": _choice("auto", *ENGINES),
}


def check_options(model: Any) -> None:
    """
    :param model: A ``PPOExt``, with or without its environment
    :raises ValueError: if the value of an option is not valid, or two options do not go together
    """
    for name, check in CHECKS.items():
        check(name.removeprefix("_"), getattr(model, name))
    if model.use_sde:
        check_number("sde_sample_freq", model.sde_sample_freq)
    for check_together in (
        _check_minibatches,
        _check_action_distribution,
        _check_classes,
        _check_losses,
        _check_learning_rate,
        _check_buffer,
    ):
        check_together(model)


def _check_minibatches(model: Any) -> None:
    if not model.normalize_advantage:
        return
    remedy = "with `normalize_advantage` the standard deviation of the advantages needs at least 2 samples"
    if model.batch_size < 2 and model.advantage_norm == "minibatch" and model.accumulate_grad < 2:
        refuse("batch_size", model.batch_size, f"{remedy}; give 2 or more, or `normalize_advantage=False`")
    if model.env is not None and model.env.num_envs * model.n_steps < 2:
        refuse("n_steps", model.n_steps, f"{remedy}, and n_envs={model.env.num_envs}; raise one of the two")


def _check_action_distribution(model: Any) -> None:
    for name in ("action_dist", "deterministic_action"):
        if name in model.policy_kwargs:
            remedy = "it is an argument of the algorithm, so that tuning cannot drop it; give it there, not in `policy_kwargs`"
            refuse(name, model.policy_kwargs[name], remedy)
    policy_class = with_action_distributions(model.policy_class)
    given = {name: value for name, value in model.policy_kwargs.items() if name in ("mean_tanh", "learn_std")}
    if model.action_dist != "gaussian":
        given["action_dist"] = model.action_dist
    for name, value in given.items():
        if not _knows(policy_class, name):
            remedy = (
                "does not take it; let it inherit `sb3_ppo_ext.MlpPolicy`, `CnnPolicy` or `MultiInputPolicy`, with `**kwargs`"
            )
            refuse(name, value, f"{policy_class.__name__} {remedy}")
    if not issubclass(policy_class, ActionDistributionMixin):
        return  # What its keywords mean is its own business.
    check_action_distribution(
        model.action_dist,
        model.deterministic_action,
        mean_tanh=model.policy_kwargs.get("mean_tanh", False),
        learn_std=model.policy_kwargs.get("learn_std", True),
        action_space=getattr(model, "action_space", None),
        use_sde=model.use_sde,
        log_std_init=model.policy_kwargs.get("log_std_init", 0.0),
    )


def _knows(policy_class: Any, keyword: str) -> bool:
    keywords = keywords_of(policy_class)
    if keywords is None:
        return keyword != "action_dist" or issubclass(policy_class, ActionDistributionMixin)
    return keyword in keywords


def _check_losses(model: Any) -> None:
    if model.bounds_coef > 0:
        remedy = None
        if not isinstance(getattr(model, "action_space", None), spaces.Box | None):
            remedy = f"{model.action_space} has no bounds; leave it at 0"
        elif ACTION_DISTS[model.action_dist].unsquashed_mean is None or model.policy_kwargs.get("mean_tanh"):
            remedy = 'the mean cannot leave the bounds with `action_dist="beta"` or `mean_tanh=True`; leave it at 0'
        if remedy is not None:
            refuse("bounds_coef", model.bounds_coef, remedy)
    if model.dual_clip is not None and model.surrogate != "clip":
        refuse("dual_clip", model.dual_clip, f'it is for `surrogate="clip"`, not {model.surrogate!r}; give None')
    if model.surrogate == "spo" and is_constant(model.clip_range) and value_of(model.clip_range, 1.0) == 0:
        refuse("clip_range", model.clip_range, '`surrogate="spo"` divides by it; give more than 0')
    if model.kl_target is not None and model.kl_coef == 0:
        refuse("kl_target", model.kl_target, "it adapts `kl_coef`, which is 0; give that a value to start from, such as 1.0")


def _check_learning_rate(model: Any) -> None:
    if model.lr_warmup >= 1:
        refuse("lr_warmup", model.lr_warmup, "nothing is left of the training after it; give less than 1")
    for name in ("learning_rate", "critic_learning_rate"):
        rate = getattr(model, name)
        if model.lr_decay != "constant" and rate is not None and not is_constant(rate):
            refuse("lr_decay", model.lr_decay, f"`{name}` is a schedule by itself; give it a number, or no `lr_decay`")
    changes_by_itself = model.lr_decay != "constant" or model.lr_warmup > 0 or not is_constant(model.learning_rate)
    if model.adaptive_lr_kl is not None and changes_by_itself:
        remedy = "give a number as `learning_rate`, no `lr_decay`, no `lr_warmup`, or `adaptive_lr_kl=None`"
        refuse("adaptive_lr_kl", model.adaptive_lr_kl, f"the KL divergence drives the learning rate; {remedy}")


def _check_classes(model: Any) -> None:
    given_to_policy = ("observation_space", "action_space", "lr_schedule", "use_sde")
    check_kwargs("policy_kwargs", model.policy_kwargs, with_action_distributions(model.policy_class), given_to_policy)
    if model.optimizer != "adam" and "optimizer_class" in model.policy_kwargs:
        refuse("optimizer", model.optimizer, "`policy_kwargs` has an `optimizer_class`; give only one of the two")
    buffer_class = model.rollout_buffer_class or RolloutBuffer
    if not callable(buffer_class):
        refuse("rollout_buffer_class", buffer_class, "give a class, or None")
    given_to_buffer = ("buffer_size", "observation_space", "action_space", "device", "gamma", "gae_lambda", "n_envs")
    check_kwargs("rollout_buffer_kwargs", model.rollout_buffer_kwargs, buffer_class, given_to_buffer)


def _check_buffer(model: Any) -> None:
    buffer_class = model.rollout_buffer_class or RolloutBuffer
    reads_sequences = isinstance(model.policy_class, type) and issubclass(model.policy_class, TransformerPolicyMixin)
    if reads_sequences and buffer_class not in (RolloutBuffer, DictRolloutBuffer):
        remedy = f"{model.policy_class.__name__} has a buffer of its own; give None"
        refuse("rollout_buffer_class", buffer_class, remedy)
    if not knows_indices(buffer_class):
        for name, needs_indices in {
            "advantage_norm": model.advantage_norm != "minibatch" and model.normalize_advantage,
            "vtrace": model.vtrace,
            "kl_coef": model.kl_coef > 0,
            "priority_alpha": model.priority_alpha > 0,
            "accumulate_grad": model.accumulate_grad > 1,
        }.items():
            if needs_indices:
                remedy = f"it must know which samples make a minibatch, and {buffer_class} has its own `get`; inherit SB3's"
                refuse(name, getattr(model, name), remedy)
    estimates = getattr(buffer_class, "compute_returns_and_advantage", None)
    if model.vtrace and estimates is not RolloutBuffer.compute_returns_and_advantage:
        refuse("vtrace", model.vtrace, f"it would replace the advantages that {buffer_class} computes; choose one of them")
