"""
Table of the options of PPOExt, one row each: type, default, accepted values, meaning, example, needs and conflicts.

The checks, the reference in ``docs/options_reference.md``, and the tests of single options and pairs derive from the rows.
"""

from dataclasses import dataclass
from typing import Any, get_args

from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer

from sb3_ppo_ext.common.action_masks import MASKABLE
from sb3_ppo_ext.common.hybrid_actions import boxes_of
from sb3_ppo_ext.common.schedules import AdaptiveLrRule, LrDecay, ScheduleLike, is_constant, value_of
from sb3_ppo_ext.distributed.launch import Distributed
from sb3_ppo_ext.distributions import ACTION_DISTS, ActionDist, DeterministicAction
from sb3_ppo_ext.engines.registry import Backend
from sb3_ppo_ext.envs.normalizer import NormalizeFreq
from sb3_ppo_ext.options.row import READ, Change, Conflict, Need, When, differs, equals, has_schedule, option, rows_of
from sb3_ppo_ext.options.values import Bounds, Choice, Dictionary, Flag, FlagOrKeys, Losses, Number, Schedule, Text
from sb3_ppo_ext.policies.mixed_precision import AmpDtype
from sb3_ppo_ext.rollout.buffer import knows_indices
from sb3_ppo_ext.update.config import AdvantageNorm, BadGradients
from sb3_ppo_ext.update.extra_losses import reads_next
from sb3_ppo_ext.update.losses import SurrogateName, VfClipMode
from sb3_ppo_ext.update.optimizers import OptimizerName

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


def draws_its_own_minibatches(model: Any) -> bool:
    """
    :param model: ``PPOExt``, with or without its rollout buffer
    :return: Whether the rollout buffer decides what is in a minibatch
    """
    return not knows_indices(model.rollout_buffer_class or RolloutBuffer) or getattr(model, "_has_own_get", False)


def _has_own_estimates(model: Any) -> bool:
    buffer_class = model.rollout_buffer_class or RolloutBuffer
    estimates = getattr(buffer_class, "compute_returns_and_advantage", None)
    return estimates is not RolloutBuffer.compute_returns_and_advantage


def _action_space(model: Any) -> Any:
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
# Action distributions that know the mean alone as a deterministic action
ONE_DETERMINISTIC = [name for name, family in ACTION_DISTS.items() if family.deterministic_actions == ("mean",)]
KL_DRIVES_RATE = (
    "the KL divergence drives the learning rate; "
    "give a number as `learning_rate`, no `lr_decay`, no `lr_warmup`, or `adaptive_lr_kl=None`"
)

# Changes between two calls of `learn`, with the methods of `ModelSetup` that are called again
OF_POLICY = Change(remedy="the policy was made with another value; make a new model with this one")
OF_BUFFER = Change(steps=("_setup_rollout_buffer",))
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


@dataclass(init=False, repr=False, eq=False)
class PPOOptions:
    """The parameters of SB3's PPO whose values are checked, with SB3's defaults, in SB3's order."""

    learning_rate: ScheduleLike = option(
        3e-4, "Learning rate of the optimiser", group=SB3, accepted=Schedule(), example="lin_0.001", change=OF_LEARNING_RATE
    )
    n_steps: int = option(
        2048,
        "Number of steps to run for each environment per update",
        group=SB3,
        accepted=COUNT,
        example=1024,
        change=OF_BUFFER,
    )
    batch_size: int = option(64, "Minibatch size", group=SB3, accepted=COUNT, example=256)
    n_epochs: int = option(10, "Number of passes over the rollout in each update", group=SB3, accepted=COUNT, example=4)
    gamma: float = option(0.99, "Discount factor", group=SB3, accepted=FRACTION, example=0.95, change=OF_BUFFER)
    gae_lambda: float = option(
        0.95,
        "Factor for the trade-off of bias and variance in Generalized Advantage Estimation (GAE)",
        group=SB3,
        accepted=FRACTION,
        example=0.9,
        change=OF_BUFFER,
    )
    clip_range: ScheduleLike = option(
        0.2,
        "Clipping parameter of the probability ratio",
        group=SB3,
        accepted=Schedule(infinite=True),
        example="lin_0.2",
        conflicts=(Conflict(SPO_WITHOUT_RANGE, '`surrogate="spo"` divides by it; give more than 0'),),
        change=OF_SCHEDULES,
    )
    clip_range_vf: ScheduleLike | None = option(
        None,
        "Clipping parameter of the value function, in units of the return; `None` for no clipping",
        group=SB3,
        accepted=Schedule(positive=True, infinite=True),
        example=0.1,
        change=OF_SCHEDULES,
    )
    normalize_advantage: bool = option(
        True, "Whether to normalize the advantages", group=SB3, accepted=Flag(as_sb3=True), change=OF_NORMALIZER
    )
    ent_coef: ScheduleLike = option(
        0.0, "Coefficient of the entropy in the loss", group=SB3, accepted=Schedule(), example="lin_0.01", change=OF_SCHEDULES
    )
    vf_coef: float = option(0.5, "Coefficient of the value loss", group=SB3, accepted=NOT_NEGATIVE, example=1.0)
    max_grad_norm: float = option(
        0.5,
        "Maximum norm of the gradient, which is scaled down if it is larger",
        group=SB3,
        accepted=Number(0, infinite=True),
        example=1.0,
    )
    use_sde: bool = option(
        False,
        "Whether to use generalized State-Dependent Exploration (gSDE) instead of independent noise at each step",
        group=SB3,
        accepted=Flag(as_sb3=True),
        conflicts=(Conflict(NOT_BOX),),
        change=OF_POLICY,
    )
    target_kl: float | None = option(
        None,
        "Stop the update early when the estimated KL divergence exceeds 1.5 times this value; `None` for no limit",
        group=SB3,
        accepted=Number(0, infinite=True),
        example=0.01,
    )
    stats_window_size: int = option(
        100,
        "Number of episodes over which the logged success rate, mean episode length and mean reward are averaged",
        group=SB3,
        accepted=Number(0, integer=True),
        example=20,
        attribute="_stats_window_size",
        change=Change(steps=("_setup_statistics",)),
    )
    policy_kwargs: dict[str, Any] | None = option(
        None,
        "Additional keyword arguments to be passed to the policy on creation",
        group=SB3,
        accepted=Dictionary(),
        example={"net_arch": [256, 256]},
        change=OF_POLICY,
    )
    seed: int | None = option(
        None,
        "Seed of the pseudo-random number generators",
        group=SB3,
        accepted=Number(0, 2**32 - 1, integer=True),
        example=1,
        change=Change(steps=("_setup_seed",)),
    )


@dataclass(init=False, repr=False, eq=False)
class PPOExtOptions:
    """The options that PPOExt adds to SB3's PPO, in the order of its constructor. They are attributes of the model."""

    action_dist: ActionDist = option(
        "gaussian",
        'Distribution of the actions in a `Box`, or in those of a hybrid action space: `"gaussian"` is SB3\'s, whose samples '
        'are clipped to the bounds; `"squashed_gaussian"` (the tanh of a Gaussian) and `"beta"` stay within the bounds',
        group=DISTRIBUTION,
        conflicts=(Conflict(equals("use_sde", True)), Conflict(NO_BOX)),
        change=OF_POLICY,
    )
    deterministic_action: DeterministicAction = option(
        "mean",
        "Action of a Beta distribution that `predict(..., deterministic=True)` returns",
        group=DISTRIBUTION,
        needs=Need("action_dist", "beta"),
        conflicts=tuple(Conflict(equals("action_dist", name)) for name in ONE_DETERMINISTIC),
        change=Change(steps=("_setup_deterministic_action",)),
    )
    action_masking: bool = option(
        False,
        "Whether the environments say which actions are valid, so that the policy chooses among these alone "
        "(https://arxiv.org/abs/2006.14171)",
        group=DISTRIBUTION,
        conflicts=(
            Conflict(
                NOT_MASKABLE,
                "{action_space} is no Discrete, MultiDiscrete or MultiBinary, whose actions can be masked; leave it at False",
            ),
        ),
        change=OF_POLICY,
    )
    action_mask_key: str | None = option(
        None,
        "Key of the mask in observations that are dictionaries; `None` for a method `action_masks` of the environments",
        group=DISTRIBUTION,
        accepted=Text("give a key of the observations, or None"),
        example="action_mask",
        needs=Need("action_masking", True),
        conflicts=(
            Conflict(equals("action_masking", False), "it has no effect without `action_masking=True`; give that as well"),
        ),
        change=OF_POLICY,
    )
    normalize_obs: bool | list[str] = option(
        False,
        "Whether the model normalizes observations by their running mean and standard deviation, as `VecNormalize` does; for "
        "`Dict` observations also the keys of those that it normalizes",
        group=NORMALIZATION,
        accepted=FlagOrKeys(),
        example=True,
        change=OF_POLICY,
    )
    normalize_reward: bool = option(
        False,
        "Whether the model is trained with rewards divided by the running standard deviation of the discounted return, as "
        "with `VecNormalize`",
        group=NORMALIZATION,
        change=OF_NORMALIZATION,
    )
    clip_obs: float = option(
        10.0,
        "Largest absolute value of a normalized observation",
        group=NORMALIZATION,
        accepted=POSITIVE_OR_INFINITE,
        example=5.0,
        needs=Need("normalize_obs"),
        change=OF_NORMALIZATION,
    )
    clip_reward: float = option(
        10.0,
        "Largest absolute value of a normalized reward",
        group=NORMALIZATION,
        accepted=POSITIVE_OR_INFINITE,
        example=5.0,
        needs=Need("normalize_reward"),
        change=OF_NORMALIZATION,
    )
    normalize_freq: NormalizeFreq = option(
        "step",
        'When the statistics change: at each `"step"`, as those of `VecNormalize`, or after each `"rollout"`',
        group=NORMALIZATION,
        change=OF_NORMALIZATION,
    )
    advantage_norm: AdvantageNorm = option(
        "minibatch",
        'Statistics that `normalize_advantage` normalizes by: those of each `"minibatch"`, those of the `"rollout"`, or '
        'exponential moving averages over the rollouts (`"ema"`)',
        group=ADVANTAGES,
        needs=Need("normalize_advantage", True),
        conflicts=(Conflict(NORMALIZED_OWN_GET, OWN_GET_REMEDY),),
        change=OF_NORMALIZER,
    )
    adv_ema_alpha: float = option(
        0.05,
        "Weight of the newest rollout in the moving averages",
        group=ADVANTAGES,
        accepted=Number(0, 1, open_low=True),
        example=0.2,
        needs=Need("advantage_norm", "ema"),
        change=OF_NORMALIZER,
    )
    adv_ema_warm_start: bool = option(
        True,
        "Whether the moving averages are corrected for their bias at the start and include a rollout before it is "
        "normalized; `False` is ProtoMotions' scheme",
        group=ADVANTAGES,
        needs=Need("advantage_norm", "ema"),
        change=OF_NORMALIZER,
    )
    adv_min_std: float = option(
        1e-8,
        "Smallest standard deviation that advantages are divided by, in units of the return",
        group=ADVANTAGES,
        accepted=POSITIVE,
        example=0.02,
        needs=Need("advantage_norm", "ema"),
        change=OF_NORMALIZER,
    )
    adv_clip: float = option(
        4.0,
        "Largest absolute value of a normalized advantage, to which larger ones are clipped",
        group=ADVANTAGES,
        accepted=POSITIVE_OR_INFINITE,
        example=3.0,
        needs=Need("advantage_norm", "ema"),
        change=OF_NORMALIZER,
    )
    adv_shift_mean: bool = option(
        True,
        "Whether the mean is subtracted from the advantages",
        group=ADVANTAGES,
        needs=Need("advantage_norm", "ema"),
        change=OF_NORMALIZER,
    )
    bounds_coef: float = option(
        0.0,
        "Coefficient of the bounds loss, which penalizes mean actions outside the bounds of a `Box`",
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
    )
    bounds_limit: float = option(
        1.1,
        "Absolute value of the mean action above which the bounds loss acts, where 1 is the bound of the action space",
        group=LOSSES,
        accepted=NOT_NEGATIVE,
        example=1.0,
        needs=Need("bounds_coef"),
    )
    vf_clip_mode: VfClipMode = option(
        "clip",
        'Value loss with `clip_range_vf`: `"clip"` is the error of the clipped value (SB3), `"max"` the larger of the '
        "clipped and the unclipped error (PPO2)",
        group=LOSSES,
        needs=Need("clip_range_vf"),
    )
    normalize_value: bool = option(
        False,
        "Whether the critic predicts returns normalized by their running mean and standard deviation "
        "(https://arxiv.org/abs/1602.07714), which are also the unit of `clip_range_vf`",
        group=LOSSES,
        change=OF_POLICY,
    )
    surrogate: SurrogateName = option(
        "clip",
        'Policy loss: `"clip"` is PPO\'s clipped surrogate, `"spo"` that of Simple Policy Optimization '
        "(https://arxiv.org/abs/2401.16025)",
        group=LOSSES,
    )
    dual_clip: float | None = option(
        None,
        "Bound of the policy loss for negative advantages, as a multiple of the advantage "
        "(https://arxiv.org/abs/1912.09729); `None` for no bound",
        group=LOSSES,
        accepted=Number(1, open_low=True),
        example=3.0,
        conflicts=(
            Conflict(
                differs("surrogate", "clip", example="spo"), 'it is for `surrogate="clip"`, not {surrogate!r}; give None'
            ),
        ),
    )
    kl_coef: float = option(
        0.0,
        "Coefficient of the KL penalty, KL(old policy || new policy)",
        group=LOSSES,
        accepted=NOT_NEGATIVE,
        example=0.5,
        conflicts=(OWN_GET_CONFLICT,),
        change=OF_KL_COEFFICIENT,
    )
    kl_target: float | None = option(
        None,
        "KL divergence in nats that `kl_coef` is adapted to after each update; `None` for a fixed coefficient",
        group=LOSSES,
        accepted=POSITIVE,
        example=0.01,
        needs=Need("kl_coef"),
        change=OF_KL_COEFFICIENT,
    )
    auxiliary_losses: dict[str, Any] | None = option(
        None,
        "Further losses of the policy by name, each with its coefficient or a dictionary of its keyword arguments: mirror "
        "symmetry, or smooth actions; `None` for none",
        group=LOSSES,
        accepted=Losses(),
        example={"caps_temporal": 0.1},
        conflicts=(Conflict(equals("backend", "native")), Conflict(NEXT_WITH_OWN_GET, OWN_GET_REMEDY)),
        change=Change(steps=("_setup_extra_losses", "_check_backend")),
    )
    vtrace: bool = option(
        False,
        "Whether to estimate the advantages anew before each epoch, corrected by V-trace for the change of the policy since "
        "the rollout (https://arxiv.org/abs/1802.01561)",
        group=ADVANTAGES,
        conflicts=(
            OWN_GET_CONFLICT,
            Conflict(
                OWN_ESTIMATES,
                "it would replace the advantages that {rollout_buffer_class} computes; choose one of them",
            ),
        ),
        change=Change(steps=("_setup_truncations",)),
    )
    vtrace_rho: float = option(
        1.0,
        "Upper bound of the importance ratio of a step, which weights its TD error",
        group=ADVANTAGES,
        accepted=POSITIVE_OR_INFINITE,
        example=0.9,
        needs=Need("vtrace", True),
    )
    vtrace_c: float = option(
        1.0,
        "Upper bound of the importance ratio that weights the TD errors of the steps that follow",
        group=ADVANTAGES,
        accepted=Number(0, infinite=True),
        example=0.9,
        needs=Need("vtrace", True),
    )
    priority_alpha: float = option(
        0.0,
        "Exponent of the priority with which segments are drawn, their sum of absolute advantages: 0 for each sample once "
        "per epoch, 1 for draws in proportion to it (https://arxiv.org/abs/1511.05952)",
        group=SAMPLING,
        accepted=NOT_NEGATIVE,
        example=0.6,
        conflicts=(OWN_GET_CONFLICT,),
    )
    priority_beta: float = option(
        0.4,
        "Exponent of the importance weights that correct for the priorities, at the start of the training; it grows to 1 at "
        "the end",
        group=SAMPLING,
        accepted=FRACTION,
        example=0.9,
        needs=Need("priority_alpha"),
    )
    priority_segment: int = option(
        16,
        "Number of successive steps that are drawn together, at most `n_steps` and `batch_size`",
        group=SAMPLING,
        accepted=COUNT,
        example=8,
        needs=Need("priority_alpha"),
    )
    optimizer: OptimizerName = option(
        "adam",
        'Optimiser of the policy: `"adam"`, `"adamw"`, `"sgd"`, or `"muon"` for hidden weight matrices with AdamW for all '
        "other parameters (needs torch 2.9)",
        group=OPTIMISER,
        conflicts=(Conflict(OPTIMIZER_CLASS, "`policy_kwargs` has an `optimizer_class`; give only one of the two"),),
        change=Change(remedy=ANOTHER_OPTIMIZER),
    )
    weight_decay: float = option(
        0.0,
        'Weight decay of all parameters but `log_std`: decoupled for `"adamw"` and `"muon"`, an L2 penalty for the others',
        group=OPTIMISER,
        accepted=NOT_NEGATIVE,
        example=0.01,
        change=OF_OPTIMIZER,
    )
    critic_learning_rate: ScheduleLike | None = option(
        None,
        "Learning rate of the critic, whose gradient is then clipped separately; `None` for `learning_rate`",
        group=LEARNING_RATE,
        accepted=Schedule(),
        example=1e-3,
        conflicts=(Conflict(NO_CRITIC),),
        change=Change(steps=("_setup_lr_schedule", "_setup_optimizer")),
    )
    lr_decay: LrDecay = option(
        "constant",
        "Decay of the learning rates over the training",
        group=LEARNING_RATE,
        conflicts=tuple(
            Conflict(has_schedule(name), f"`{name}` is a schedule by itself; give it a number, or no `lr_decay`")
            for name in ("learning_rate", "critic_learning_rate")
        ),
        change=OF_LEARNING_RATE,
    )
    lr_min_fraction: float = option(
        0.0,
        "Fraction of the initial learning rate that is left at the end of the decay",
        group=LEARNING_RATE,
        accepted=FRACTION,
        example=0.1,
        needs=Need("lr_decay"),
        change=OF_LEARNING_RATE,
    )
    lr_warmup: float = option(
        0.0,
        "Fraction of the training, at least one update, during which the learning rates grow linearly",
        group=LEARNING_RATE,
        accepted=Number(0, 1, open_high=True),
        example=0.05,
        change=OF_LEARNING_RATE,
    )
    adaptive_lr_kl: ScheduleLike | None = option(
        None,
        "KL divergence in nats that the learning rate is adapted to after each update; `None` for no adaptation",
        group=LEARNING_RATE,
        accepted=Schedule(positive=True),
        example=0.01,
        conflicts=(
            Conflict(differs("lr_decay", "constant", example="linear"), KL_DRIVES_RATE),
            Conflict(differs("lr_warmup", 0.0, example=0.3), KL_DRIVES_RATE),
            Conflict(has_schedule("learning_rate"), KL_DRIVES_RATE),
        ),
        change=OF_LEARNING_RATE,
    )
    adaptive_lr_rule: AdaptiveLrRule = option(
        "threshold",
        'How the learning rate follows the KL divergence: `"threshold"`, by a factor of 1.5 if it is more than twice or less '
        'than half of `adaptive_lr_kl`, or `"proportional"`, always, by the square root of their ratio, at most 1.5',
        group=LEARNING_RATE,
        needs=Need("adaptive_lr_kl"),
        change=OF_LEARNING_RATE,
    )
    adaptive_lr_bounds: tuple[float, float] = option(
        (1e-5, 1e-2),
        "Smallest and largest value of the adapted learning rate, which also bound its initial value",
        group=LEARNING_RATE,
        accepted=Bounds("give the least and the largest learning rate, such as (1e-5, 1e-2)"),
        example=(1e-4, 1e-3),
        needs=Need("adaptive_lr_kl"),
        change=OF_LEARNING_RATE,
    )
    max_clip_fraction: float | None = option(
        None,
        "Fraction of clipped samples in a minibatch above which the actor is frozen for the rest of the update, while the "
        "critic keeps learning; `None` for no limit",
        group=GUARDS,
        accepted=FRACTION,
        example=0.6,
        conflicts=(Conflict(NO_CRITIC),),
        change=Change(steps=("_check_critic",)),
    )
    accumulate_grad: int = option(
        1,
        "Number of minibatches whose gradients make one step of the optimiser: as with a larger `batch_size`, in less memory",
        group=OPTIMISER,
        accepted=COUNT,
        example=4,
        conflicts=(OWN_GET_CONFLICT,),
    )
    bad_gradients: BadGradients = option(
        "raise",
        'Reaction to a loss or gradient that is not finite: `"raise"` a `ValueError`, or `"skip"` the step of the optimiser',
        group=GUARDS,
    )
    backend: Backend = option(
        "auto",
        'Engine that computes rollouts and updates: `"eager"` is PyTorch, on the CPU equal to SB3\'s PPO bit for bit; '
        '`"fused"` replaces Adam and the clipping of gradients by C; `"native"` computes MLP policies on the CPU in C, and '
        'may draw other random numbers; `"device"` keeps rollouts and updates on the device of the policy; `"compile"` uses '
        '`torch.compile`; `"auto"` is the first of native, device (on a GPU, or with tensor environments), fused and eager '
        "that supports the policy and the options",
        group=ENGINE,
        change=OF_ENGINE,
    )
    native_threads: int = option(
        1,
        'Number of threads that compute large networks in updates with `backend="native"`; it changes the speed alone, and '
        "has no effect with another engine",
        group=ENGINE,
        accepted=Number(1, 256, integer=True),
        example=2,
    )
    amp_dtype: AmpDtype | None = option(
        None,
        'Type in which the networks compute, `"bfloat16"` or `"float16"`, for GPUs; action distributions, losses, parameters '
        "and the optimiser stay in float32; `None` for float32 everywhere",
        group=ENGINE,
        accepted=Choice(get_args(AmpDtype)),
        example="bfloat16",
        conflicts=tuple(
            Conflict(
                equals("backend", name), '`backend={backend!r}` computes in float32 alone; give `backend="auto"` or `"device"`'
            )
            for name in ("native", "fused", "eager", "compile")
        ),
        change=Change(steps=("_setup_precision", "_setup_rollout_buffer", "_check_backend")),
    )
    distributed: Distributed = option(
        "auto",
        'Whether several processes that torchrun has started train one model together (`"auto"`), each with environments of '
        'its own, or independent ones (`"off"`)',
        group=ENGINE,
        change=Change(remedy="the processes have been seeded; give it to the constructor, or to `load`"),
    )


PPO_OPTIONS = rows_of(PPOOptions)
OWN_OPTIONS = rows_of(PPOExtOptions)
ALL_OPTIONS = PPO_OPTIONS | OWN_OPTIONS
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
