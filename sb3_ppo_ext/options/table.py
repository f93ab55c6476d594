"""
Table of the options of PPOExt. A row says what the constructor in ``constructor.py`` cannot: the range, an example, what the
option needs and what it cannot be combined with, and how a change acts between two calls of ``learn``.

The checks, the reference in ``docs/options_reference.md``, and the tests of single options and pairs derive from the table.
"""

from typing import get_args

from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer

from sb3_ppo_ext.common.action_masks import MASKABLE
from sb3_ppo_ext.common.hybrid_actions import boxes_of
from sb3_ppo_ext.common.schedules import is_constant, value_of
from sb3_ppo_ext.distributions import ACTION_DISTS
from sb3_ppo_ext.options.constructor import ConfiguredPPO
from sb3_ppo_ext.options.row import READ, Change, Conflict, Need, Row, When, differs, equals, has_schedule, options_of
from sb3_ppo_ext.options.values import (
    Bounds,
    Choice,
    Dictionary,
    Flag,
    FlagOrKeys,
    Losses,
    Number,
    NumberOrAuto,
    Schedule,
    Text,
)
from sb3_ppo_ext.policies.mixed_precision import AmpDtype
from sb3_ppo_ext.rollout.buffer import knows_indices
from sb3_ppo_ext.update.extra_losses import reads_next

SB3 = "Parameters of SB3's PPO"
DISTRIBUTION = "Action distribution"
NORMALIZATION = "Normalization of observations and rewards"
ADVANTAGES = "Advantages"
LOSSES = "Losses"
SAMPLING = "Sampling"
OPTIMISER = "Optimiser"
LEARNING_RATE = "Learning rate"
GUARDS = "Guards"
ENGINE = "Engine"

COUNT = Number(1, integer=True)
FRACTION = Number(0, 1)
NOT_NEGATIVE = Number(0)
POSITIVE = Number(0, open_low=True)
POSITIVE_OR_INFINITE = Number(0, open_low=True, infinite=True)


def draws_its_own_minibatches(model: ConfiguredPPO) -> bool:
    """
    :param model: ``PPOExt``, with or without its rollout buffer
    :return: Whether the rollout buffer decides what is in a minibatch
    """
    return not knows_indices(model.rollout_buffer_class or RolloutBuffer) or getattr(model, "_has_own_get", False)


def _has_own_estimates(model: ConfiguredPPO) -> bool:
    buffer_class = model.rollout_buffer_class or RolloutBuffer
    estimates = getattr(buffer_class, "compute_returns_and_advantage", None)
    return estimates is not RolloutBuffer.compute_returns_and_advantage


def _action_space(model: ConfiguredPPO) -> spaces.Space | None:
    """Action space of the environments, ``None`` if it is not known yet."""
    return getattr(model, "action_space", None)


OWN_GET = When("a `rollout_buffer_class` that overrides `get`", draws_its_own_minibatches)
OWN_GET_REMEDY = "it needs the indices of a minibatch's samples, but {rollout_buffer_class} has its own `get`; inherit SB3's"
OWN_GET_CONFLICT = Conflict(OWN_GET, OWN_GET_REMEDY)
NEXT_WITH_OWN_GET = When(
    f"{OWN_GET.text} and `caps_temporal`",
    lambda model: reads_next(model.auxiliary_losses) and draws_its_own_minibatches(model),
)
# `advantage_norm` has no effect without `normalize_advantage`.
NORMALIZED_OWN_GET = When(OWN_GET.text, lambda model: model.normalize_advantage and draws_its_own_minibatches(model))
OWN_ESTIMATES = When("a `rollout_buffer_class` that overrides `compute_returns_and_advantage`", _has_own_estimates)
NOT_BOX = When("action spaces other than `Box`", lambda model: not isinstance(_action_space(model), spaces.Box | None))
NO_BOX = When(
    "action spaces without a `Box`", lambda model: _action_space(model) is not None and not boxes_of(_action_space(model))
)
MEAN_TANH = When(
    "`mean_tanh=True` in `policy_kwargs`",
    lambda model: bool(model.policy_kwargs.get("mean_tanh")),
    {"policy_kwargs": {"mean_tanh": True}},
)
OPTIMIZER_CLASS = When("an `optimizer_class` in `policy_kwargs`", lambda model: "optimizer_class" in model.policy_kwargs)
NOT_MASKABLE = When(
    "action spaces other than `Discrete`, `MultiDiscrete` and `MultiBinary`",
    lambda model: not isinstance(getattr(model, "action_space", None), (*MASKABLE, type(None))),
)
NO_CRITIC = When("policies without a critic of their own", lambda model: False)
SPO_WITHOUT_RANGE = When(
    '`surrogate="spo"` if it is 0',
    lambda model: model.surrogate == "spo" and is_constant(model.clip_range) and value_of(model.clip_range, 1.0) == 0,
    {"surrogate": "spo", "clip_range": 0.0},
)
MEAN_WITHIN_BOUNDS = [
    *(equals("action_dist", name) for name, family in ACTION_DISTS.items() if family.unsquashed_mean is None),
    MEAN_TANH,
]
# Action distributions that do not sample from a Gaussian
NO_GAUSSIAN = [name for name, family in ACTION_DISTS.items() if not family.has_log_std]
# Action distributions whose deterministic action can only be the mean
ONE_DETERMINISTIC = [name for name, family in ACTION_DISTS.items() if family.deterministic_actions == ("mean",)]
KL_DRIVES_RATE = (
    "the KL divergence drives the learning rate; "
    'give a number as `learning_rate`, `lr_decay="constant"`, no `lr_warmup`, or `adaptive_lr_kl=None`'
)

# Changes between two calls of `learn`, with the methods of `ModelSetup` that are called again
OF_POLICY = Change(remedy="the policy was made with another value; make a new model with this one")
OF_BUFFER = Change(steps=("_setup_rollout_buffer",))
OF_DISCOUNT = Change(steps=("_choose_discount", "_setup_rollout_buffer"))
# Instead of a buffer that was assigned as well
OF_BUFFER_CLASS = Change(steps=("_remember_buffer", "_setup_rollout_buffer"))
OF_ENGINE = Change(steps=("_setup_rollout_buffer", "_check_backend"))
OF_SCHEDULES = Change(steps=("_setup_schedules",))
OF_KL_COEFFICIENT = Change(steps=("_setup_kl_coefficient",))
OF_LEARNING_RATE = Change(steps=("_setup_lr_schedule",))
OF_NORMALIZER = Change(steps=("_setup_advantages",))
OF_NORMALIZATION = Change(steps=("_setup_normalizer",))
OF_OPTIMIZER = Change(steps=("_setup_optimizer",))
ANOTHER_OPTIMIZER = "the moments of another optimiser mean something else; make a new model, and give it the policy with "
ANOTHER_OPTIMIZER += '`set_parameters({"policy": model.policy.state_dict()}, exact_match=False)`'

# In any order: the table has that of the constructor.
ROWS = {
    "learning_rate": Row(group=SB3, accepted=Schedule(), example="lin_0.001", change=OF_LEARNING_RATE),
    "n_steps": Row(group=SB3, accepted=COUNT, example=1024, change=OF_BUFFER),
    "batch_size": Row(group=SB3, accepted=COUNT, example=256),
    "n_epochs": Row(group=SB3, accepted=COUNT, example=4),
    "gamma": Row(group=SB3, accepted=NumberOrAuto(0, 1), example=0.95, change=OF_DISCOUNT),
    "gae_lambda": Row(group=SB3, accepted=FRACTION, example=0.9, change=OF_BUFFER),
    "clip_range": Row(
        group=SB3,
        accepted=Schedule(infinite=True),
        example="lin_0.2",
        conflicts=(Conflict(SPO_WITHOUT_RANGE, '`surrogate="spo"` divides by it; give more than 0'),),
        change=OF_SCHEDULES,
    ),
    "clip_range_vf": Row(group=SB3, accepted=Schedule(positive=True, infinite=True), example=0.1, change=OF_SCHEDULES),
    "normalize_advantage": Row(group=SB3, accepted=Flag(as_sb3=True), change=OF_NORMALIZER),
    "ent_coef": Row(group=SB3, accepted=Schedule(), example="lin_0.01", change=OF_SCHEDULES),
    "vf_coef": Row(group=SB3, accepted=NOT_NEGATIVE, example=1.0),
    "max_grad_norm": Row(group=SB3, accepted=Number(0, infinite=True), example=1.0),
    "use_sde": Row(group=SB3, accepted=Flag(as_sb3=True), conflicts=(Conflict(NOT_BOX),), change=OF_POLICY),
    "target_kl": Row(group=SB3, accepted=Number(0, infinite=True), example=0.01),
    "stats_window_size": Row(
        group=SB3,
        accepted=Number(0, integer=True),
        example=20,
        attribute="_stats_window_size",
        change=Change(steps=("_setup_statistics",)),
    ),
    "policy_kwargs": Row(group=SB3, accepted=Dictionary(), example={"net_arch": [256, 256]}, change=OF_POLICY),
    "seed": Row(group=SB3, accepted=Number(0, 2**32 - 1, integer=True), example=1, change=Change(steps=("_setup_seed",))),
    "action_dist": Row(group=DISTRIBUTION, conflicts=(Conflict(equals("use_sde", True)), Conflict(NO_BOX)), change=OF_POLICY),
    "deterministic_action": Row(
        group=DISTRIBUTION,
        needs=Need("action_dist", "beta"),
        conflicts=tuple(Conflict(equals("action_dist", name)) for name in ONE_DETERMINISTIC),
        change=Change(steps=("_setup_deterministic_action",)),
    ),
    "noise_color": Row(
        group=DISTRIBUTION,
        accepted=Number(0, 2),
        example=1.0,
        conflicts=(
            Conflict(equals("use_sde", True)),
            *(Conflict(equals("action_dist", name)) for name in NO_GAUSSIAN),
            Conflict(NO_BOX),
        ),
        change=Change(steps=("_check_noise",)),
    ),
    "action_masking": Row(
        group=DISTRIBUTION,
        conflicts=(
            Conflict(
                NOT_MASKABLE,
                "{action_space} is no Discrete, MultiDiscrete or MultiBinary, whose actions can be masked; leave it at False",
            ),
        ),
        change=OF_POLICY,
    ),
    "action_mask_key": Row(
        group=DISTRIBUTION,
        accepted=Text("give a key of the observations, or None"),
        example="action_mask",
        needs=Need("action_masking", True),
        conflicts=(
            Conflict(equals("action_masking", False), "it has no effect without `action_masking=True`; give that as well"),
        ),
        change=OF_POLICY,
    ),
    "normalize_obs": Row(group=NORMALIZATION, accepted=FlagOrKeys(), example=True, change=OF_POLICY),
    "normalize_reward": Row(group=NORMALIZATION, change=OF_NORMALIZATION),
    "clip_obs": Row(
        group=NORMALIZATION, accepted=POSITIVE_OR_INFINITE, example=5.0, needs=Need("normalize_obs"), change=OF_NORMALIZATION
    ),
    "clip_reward": Row(
        group=NORMALIZATION,
        accepted=POSITIVE_OR_INFINITE,
        example=5.0,
        needs=Need("normalize_reward"),
        change=OF_NORMALIZATION,
    ),
    "normalize_freq": Row(
        group=NORMALIZATION, needs=Need("normalize_obs", instead="normalize_reward"), change=OF_NORMALIZATION
    ),
    "advantage_norm": Row(
        group=ADVANTAGES,
        needs=Need("normalize_advantage", True),
        conflicts=(Conflict(NORMALIZED_OWN_GET, OWN_GET_REMEDY),),
        change=OF_NORMALIZER,
    ),
    "adv_ema_alpha": Row(
        group=ADVANTAGES,
        accepted=Number(0, 1, open_low=True),
        example=0.2,
        needs=Need("advantage_norm", "ema"),
        change=OF_NORMALIZER,
    ),
    "adv_ema_warm_start": Row(group=ADVANTAGES, needs=Need("advantage_norm", "ema"), change=OF_NORMALIZER),
    "adv_min_std": Row(
        group=ADVANTAGES, accepted=POSITIVE, example=0.02, needs=Need("advantage_norm", "ema"), change=OF_NORMALIZER
    ),
    "adv_clip": Row(
        group=ADVANTAGES, accepted=POSITIVE_OR_INFINITE, example=3.0, needs=Need("advantage_norm", "ema"), change=OF_NORMALIZER
    ),
    "adv_shift_mean": Row(group=ADVANTAGES, needs=Need("advantage_norm", "ema"), change=OF_NORMALIZER),
    "bounds_coef": Row(
        group=LOSSES,
        accepted=NOT_NEGATIVE,
        example=0.1,
        conflicts=(
            Conflict(NO_BOX, "{action_space} has no bounds; leave it at 0"),
            *(
                Conflict(when, f"the mean cannot leave the bounds with {when.text}; leave it at 0")
                for when in MEAN_WITHIN_BOUNDS
            ),
        ),
    ),
    "bounds_limit": Row(group=LOSSES, accepted=NOT_NEGATIVE, example=1.0, needs=Need("bounds_coef")),
    "vf_clip_mode": Row(group=LOSSES, needs=Need("clip_range_vf")),
    "normalize_value": Row(group=LOSSES, change=OF_POLICY),
    "surrogate": Row(group=LOSSES),
    "dual_clip": Row(
        group=LOSSES,
        accepted=Number(1, open_low=True),
        example=3.0,
        conflicts=(
            Conflict(
                differs("surrogate", "clip", example="spo"), 'it is for `surrogate="clip"`, not {surrogate!r}; give None'
            ),
        ),
    ),
    "kl_coef": Row(group=LOSSES, accepted=NOT_NEGATIVE, example=0.5, conflicts=(OWN_GET_CONFLICT,), change=OF_KL_COEFFICIENT),
    "kl_target": Row(group=LOSSES, accepted=POSITIVE, example=0.01, needs=Need("kl_coef"), change=OF_KL_COEFFICIENT),
    "auxiliary_losses": Row(
        group=LOSSES,
        accepted=Losses(),
        example={"caps_temporal": 0.1},
        conflicts=(Conflict(equals("backend", "native")), Conflict(NEXT_WITH_OWN_GET, OWN_GET_REMEDY)),
        change=Change(steps=("_setup_extra_losses", "_check_backend")),
    ),
    "vtrace": Row(
        group=ADVANTAGES,
        conflicts=(
            OWN_GET_CONFLICT,
            Conflict(
                OWN_ESTIMATES,
                "it would replace the advantages that {rollout_buffer_class} computes; choose one of them",
            ),
        ),
        change=Change(steps=("_setup_truncations",)),
    ),
    "vtrace_rho": Row(group=ADVANTAGES, accepted=POSITIVE_OR_INFINITE, example=0.9, needs=Need("vtrace", True)),
    "vtrace_c": Row(group=ADVANTAGES, accepted=Number(0, infinite=True), example=0.9, needs=Need("vtrace", True)),
    "priority_alpha": Row(group=SAMPLING, accepted=NOT_NEGATIVE, example=0.6, conflicts=(OWN_GET_CONFLICT,)),
    "priority_beta": Row(group=SAMPLING, accepted=FRACTION, example=0.9, needs=Need("priority_alpha")),
    "priority_segment": Row(group=SAMPLING, accepted=COUNT, example=8, needs=Need("priority_alpha")),
    "optimizer": Row(
        group=OPTIMISER,
        conflicts=(Conflict(OPTIMIZER_CLASS, "`policy_kwargs` has an `optimizer_class`; give only one of the two"),),
        change=Change(remedy=ANOTHER_OPTIMIZER),
    ),
    "weight_decay": Row(group=OPTIMISER, accepted=NOT_NEGATIVE, example=0.01, change=OF_OPTIMIZER),
    "critic_learning_rate": Row(
        group=LEARNING_RATE,
        accepted=Schedule(),
        example=1e-3,
        conflicts=(Conflict(NO_CRITIC),),
        change=Change(steps=("_setup_lr_schedule", "_setup_optimizer")),
    ),
    "lr_decay": Row(
        group=LEARNING_RATE,
        conflicts=tuple(
            Conflict(has_schedule(name), f'`{name}` is a schedule by itself; give it a number, or `lr_decay="constant"`')
            for name in ("learning_rate", "critic_learning_rate")
        ),
        change=OF_LEARNING_RATE,
    ),
    "lr_min_fraction": Row(
        group=LEARNING_RATE, accepted=FRACTION, example=0.1, needs=Need("lr_decay"), change=OF_LEARNING_RATE
    ),
    "lr_warmup": Row(group=LEARNING_RATE, accepted=Number(0, 1, open_high=True), example=0.05, change=OF_LEARNING_RATE),
    "adaptive_lr_kl": Row(
        group=LEARNING_RATE,
        accepted=Schedule(positive=True),
        example=0.01,
        conflicts=(
            Conflict(differs("lr_decay", "constant", example="linear"), KL_DRIVES_RATE),
            Conflict(differs("lr_warmup", 0.0, example=0.3), KL_DRIVES_RATE),
            Conflict(has_schedule("learning_rate"), KL_DRIVES_RATE),
        ),
        change=OF_LEARNING_RATE,
    ),
    "adaptive_lr_rule": Row(group=LEARNING_RATE, needs=Need("adaptive_lr_kl"), change=OF_LEARNING_RATE),
    "adaptive_lr_bounds": Row(
        group=LEARNING_RATE,
        accepted=Bounds("give the least and the largest learning rate, such as (1e-5, 1e-2)"),
        example=(1e-4, 1e-3),
        needs=Need("adaptive_lr_kl"),
        change=OF_LEARNING_RATE,
    ),
    "max_clip_fraction": Row(
        group=GUARDS, accepted=FRACTION, example=0.6, conflicts=(Conflict(NO_CRITIC),), change=Change(steps=("_check_critic",))
    ),
    "accumulate_grad": Row(group=OPTIMISER, accepted=COUNT, example=4, conflicts=(OWN_GET_CONFLICT,)),
    "bad_gradients": Row(group=GUARDS),
    "backend": Row(group=ENGINE, change=OF_ENGINE),
    "native_threads": Row(group=ENGINE, accepted=Number(1, 256, integer=True), example=2),
    "amp_dtype": Row(
        group=ENGINE,
        accepted=Choice(get_args(AmpDtype)),
        example="bfloat16",
        conflicts=tuple(
            Conflict(
                equals("backend", name), '`backend={backend!r}` computes only in float32; give `backend="auto"` or `"device"`'
            )
            for name in ("native", "fused", "eager", "compile")
        ),
        change=Change(steps=("_setup_precision", "_setup_rollout_buffer", "_check_backend")),
    ),
    "distributed": Row(
        group=ENGINE, change=Change(remedy="the processes have been seeded; give it to the constructor, or to `load`")
    ),
}


ALL_OPTIONS = options_of(ConfiguredPPO.__init__, ROWS)
OWN_OPTIONS = {name: option for name, option in ALL_OPTIONS.items() if option.is_own}
PPO_OPTIONS = {name: option for name, option in ALL_OPTIONS.items() if not option.is_own}
# Changes of all attributes that come from arguments of the constructor, and of the kind of the environments
CHANGES = {row.attribute: row.change for row in ALL_OPTIONS.values()} | {
    "policy_class": OF_POLICY,
    "device": Change(remedy="the model is on another device; give it to `load`"),
    "rollout_buffer_class": OF_BUFFER_CLASS,
    "rollout_buffer_kwargs": OF_BUFFER_CLASS,
    "_steps_in_tensors": OF_ENGINE,
    "_normalized_parts": OF_BUFFER,
    "_has_own_get": READ,
    **dict.fromkeys(("sde_sample_freq", "tensorboard_log", "verbose"), READ),
}
