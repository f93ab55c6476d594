"""Checks of all options of a model: the rows of the table, and conditions that depend on more than the options."""

import warnings
from collections.abc import Container

from gymnasium import spaces
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.policies import BasePolicy

from sb3_ppo_ext.common.action_masks import MASKABLE
from sb3_ppo_ext.common.hybrid_actions import is_hybrid
from sb3_ppo_ext.common.plain_data import python_numbers
from sb3_ppo_ext.common.user_code import is_of_user
from sb3_ppo_ext.common.validation import (
    check_kwargs,
    check_number,
    described,
    keywords_of,
    refuse,
)
from sb3_ppo_ext.distributed.launch import find_launch
from sb3_ppo_ext.envs.tensors.tensor_vec_transpose_image import steps_in_tensors
from sb3_ppo_ext.memory.history import HistoryPolicy
from sb3_ppo_ext.memory.recurrent_policies import check_recurrence, with_own_recurrence
from sb3_ppo_ext.options.arguments import check_logging
from sb3_ppo_ext.options.constructor import ConfiguredPPO
from sb3_ppo_ext.options.places import place_of
from sb3_ppo_ext.options.policy_kwargs import check_policy_kwargs
from sb3_ppo_ext.options.row import Option
from sb3_ppo_ext.options.table import (
    ALL_OPTIONS,
    draws_its_own_minibatches,
)
from sb3_ppo_ext.policies.action_masking import check_mask_key
from sb3_ppo_ext.policies.actor_critic import (
    OWN_KEYWORDS,
    ActionDistributionMixin,
    check_masking,
    normalizes,
    with_action_distributions,
    with_own_masking,
)
from sb3_ppo_ext.policies.distribution_checks import check_action_distribution
from sb3_ppo_ext.update.extra_losses import reads_next

# Arguments that have no row in the table
_FURTHER_NUMBERS = ("sde_sample_freq", "verbose", "rollout_buffer_kwargs")


def convert_options(model: ConfiguredPPO) -> None:
    """
    Replace NumPy's numbers in the options of a model by Python's, so that what is saved can be read, and the policies of
    RecurrentPPO by ours.

    :param model: ``PPOExt``, with or without its environment
    """
    for name in (*(option.attribute for option in ALL_OPTIONS.values()), *_FURTHER_NUMBERS):
        setattr(model, name, python_numbers(getattr(model, name)))
    model.policy_class = with_own_recurrence(model.policy_class)
    if model.action_masking:
        model.policy_class = with_own_masking(model.policy_class)


def check_options(model: ConfiguredPPO, changed: Container[str] | None = None) -> None:
    """
    Check every option of a model, and that the options can be combined.

    :param model: ``PPOExt``, with or without its environment
    :param changed: Names of the attributes whose values are checked, ``None`` for all
    :raises ValueError: if the value of an option is not valid, or options exclude each other
    """
    for option in ALL_OPTIONS.values():
        if changed is None or option.attribute in changed:
            option.check(model)
    if model.use_sde:
        check_number("sde_sample_freq", model.sde_sample_freq, integer=True)
    check_logging(model.tensorboard_log, model.verbose)
    _check_minibatches(model)
    _check_policy(model)
    _check_buffer(model)
    _check_ranks(model)
    _check_masks(model)
    _check_losses(model)
    for option in ALL_OPTIONS.values():
        option.check_conflicts(model)
        if changed is None or option.attribute in changed:
            _warn_without_need(option, model)


def _warn_without_need(option: Option, model: ConfiguredPPO) -> None:
    """Warn if the option has no effect, since the one that it needs is off."""
    value, need = getattr(model, option.attribute), option.needs
    if need is None or (tuple(value) if isinstance(value, list) else value) == option.default:
        return
    needed = ALL_OPTIONS[need.name]
    current = getattr(model, needed.attribute)
    if current == need.value if need.value is not None else current != needed.default:
        return
    if need.instead is not None and getattr(model, need.instead) != ALL_OPTIONS[need.instead].default:
        return
    remedy = f"give {need.described()} as well, or leave `{option.name}` out"
    warnings.warn(f"`{option.name}={described(value)}` has no effect without {need.described()}: {remedy}.", stacklevel=2)


def _check_minibatches(model: ConfiguredPPO) -> None:
    if not model.normalize_advantage:
        return
    remedy = "with `normalize_advantage` the standard deviation of the advantages needs at least 2 samples"
    if model.batch_size < 2 and model.advantage_norm == "minibatch" and model.accumulate_grad < 2:
        refuse("batch_size", model.batch_size, f"{remedy}; give 2 or more, or `normalize_advantage=False`")
    if model.env is not None and model.env.num_envs * model.n_steps < 2:
        refuse("n_steps", model.n_steps, f"{remedy}, and n_envs={model.env.num_envs}; raise one of the two")


def _check_losses(model: ConfiguredPPO) -> None:
    if model.n_steps == 1 and reads_next(model.auxiliary_losses):
        refuse("auxiliary_losses", model.auxiliary_losses, "with `n_steps=1`, no step follows another; raise it to 2 or more")


def _check_masks(model: ConfiguredPPO) -> None:
    spaces_of_model = [getattr(model, f"{name}_space", None) for name in ("observation", "action")]
    if not model.action_masking or None in spaces_of_model or not isinstance(spaces_of_model[1], MASKABLE):
        return
    if model.action_mask_key is not None:
        check_mask_key(model.action_mask_key, *spaces_of_model)
    elif steps_in_tensors(model.env):
        remedy = "environments that step in tensors have their masks in the observations; give `action_mask_key` as well"
        refuse("action_masking", True, remedy)


def _check_ranks(model: ConfiguredPPO) -> None:
    n_ranks = find_launch(model.distributed).size
    if n_ranks == 1:
        return
    if model.batch_size % n_ranks > 0:
        remedy = f"it is divided among the {n_ranks} processes of torchrun; give a multiple of {n_ranks}"
        refuse("batch_size", model.batch_size, f'{remedy}, or `distributed="off"` to train independent models')
    if model.accumulate_grad > 1 and model.priority_alpha > 0:
        remedy = "with `priority_alpha`, the processes of torchrun get parts of different sizes of a minibatch"
        refuse("accumulate_grad", model.accumulate_grad, f"{remedy}; give 1, and a smaller `batch_size`")
    if draws_its_own_minibatches(model):
        remedy = "it draws its own minibatches, which the processes of torchrun cannot share"
        refuse("rollout_buffer_class", model.rollout_buffer_class, f'{remedy}; give None, or `distributed="off"`')


def _check_policy(model: ConfiguredPPO) -> None:
    for name in ("action_dist", "deterministic_action", "action_mask_key", "normalize_value"):
        if name in model.policy_kwargs:
            remedy = "it is an argument of the algorithm, so that tuning cannot drop it; give it there, not in `policy_kwargs`"
            refuse(name, model.policy_kwargs[name], remedy)
    if "with_critic" in model.policy_kwargs:
        remedy = "PPO needs a critic; leave it out, and call `model.policy.without_critic()` for a policy that only acts"
        classes = "policies of this package have it: `from sb3_ppo_ext import MlpPolicy`"
        refuse("with_critic", model.policy_kwargs["with_critic"], f"{remedy} ({classes})")
    policy_class = with_action_distributions(model.policy_class)
    check_recurrence(policy_class)
    check_masking(policy_class, model.action_masking)
    action_space = getattr(model, "action_space", None)
    if is_hybrid(action_space) and not issubclass(policy_class, ActionDistributionMixin):
        remedy = "let it inherit `sb3_ppo_ext.MlpPolicy`, `CnnPolicy` or `MultiInputPolicy`"
        refuse("policy", policy_class, f"SB3's policies know no actions in a {type(action_space).__name__}; {remedy}")
    for name in policy_class.UNCALLED if issubclass(policy_class, HistoryPolicy) else ():
        if is_of_user(getattr(policy_class, name)):
            remedy = "would not be called in all steps; override `_get_action_dist_from_latent`, or give a features extractor"
            refuse("policy", policy_class, f"it has a memory, and its own `{name}` {remedy}")
    if model.normalize_obs and not normalizes(policy_class):
        remedy = (
            f"`{policy_class.__name__}` would not normalise what `predict` gets; let it inherit `sb3_ppo_ext.MlpPolicy`, "
            "`CnnPolicy` or `MultiInputPolicy` in the place of SB3's class, or put the environments in a `VecNormalize`"
        )
        refuse("normalize_obs", model.normalize_obs, remedy)
    _check_keywords(model, policy_class)
    if issubclass(policy_class, ActionDistributionMixin):  # Keywords of other classes may mean something else.
        check_action_distribution(
            model.action_dist,
            model.deterministic_action,
            mean_tanh=model.policy_kwargs.get("mean_tanh", False),
            learn_std=model.policy_kwargs.get("learn_std", True),
            action_space=action_space,
            use_sde=model.use_sde,
            log_std_init=model.policy_kwargs.get("log_std_init", 0.0),
        )
    given_to_policy = ("observation_space", "action_space", "lr_schedule", "use_sde")
    check_kwargs("policy_kwargs", model.policy_kwargs, policy_class, given_to_policy, _place_of_keyword)
    check_policy_kwargs(policy_class, model.policy_kwargs, makes_optimizer=model.optimizer == "adam")


def _place_of_keyword(name: str) -> str | None:
    return "it is an argument of `PPOExt` itself" if name in ALL_OPTIONS else place_of(name)


def _check_keywords(model: ConfiguredPPO, policy_class: type) -> None:
    given = {name: value for name, value in model.policy_kwargs.items() if name in OWN_KEYWORDS}
    if model.action_dist != "gaussian":
        given["action_dist"] = model.action_dist
    if model.action_masking:
        given["action_mask_key"] = model.action_mask_key
    if model.normalize_value:
        given["normalize_value"] = True
    for name, value in given.items():
        if not knows(policy_class, name):
            remedy = (
                "does not take it; let it inherit `sb3_ppo_ext.MlpPolicy`, `CnnPolicy` or `MultiInputPolicy`, with `**kwargs`"
            )
            refuse(name, value, f"{policy_class.__name__} {remedy}")


def knows(policy_class: type[BasePolicy], keyword: str) -> bool:
    """
    :param policy_class: Class of a policy
    :param keyword: Name of an argument of this package's policies
    :return: Whether the class takes it
    """
    keywords = keywords_of(policy_class)
    if keywords is None:
        own = ("action_dist", "action_mask_key", "normalize_value")
        return keyword not in own or issubclass(policy_class, ActionDistributionMixin)
    return keyword in keywords


def _check_buffer(model: ConfiguredPPO) -> None:
    adds_masks = model.action_masking and model.action_mask_key is None
    has_dicts = adds_masks or isinstance(getattr(model, "observation_space", None), spaces.Dict)
    usual = DictRolloutBuffer if has_dicts else RolloutBuffer
    buffer_class = usual if model.rollout_buffer_class is None else model.rollout_buffer_class
    _check_buffer_class(buffer_class, usual)
    given_to_buffer = ("buffer_size", "observation_space", "action_space", "device", "gamma", "gae_lambda", "n_envs")
    check_kwargs("rollout_buffer_kwargs", model.rollout_buffer_kwargs or {}, buffer_class, given_to_buffer)
    reads_sequences = isinstance(model.policy_class, type) and issubclass(model.policy_class, HistoryPolicy)
    if reads_sequences and buffer_class not in (RolloutBuffer, DictRolloutBuffer):
        remedy = f"{model.policy_class.__name__} has a buffer of its own; give None"
        refuse("rollout_buffer_class", buffer_class, remedy)


def _check_buffer_class(buffer_class: object, usual: type[RolloutBuffer]) -> None:
    remedy = f"give a class that inherits SB3's `{usual.__name__}`, or None"
    needed = ("add", "get", "reset", "compute_returns_and_advantage")
    is_class = isinstance(buffer_class, type)
    if not callable(buffer_class) or (is_class and not all(hasattr(buffer_class, name) for name in needed)):
        refuse("rollout_buffer_class", buffer_class, remedy)
    if buffer_class in (RolloutBuffer, DictRolloutBuffer) and buffer_class is not usual:
        refuse("rollout_buffer_class", buffer_class, f"it does not store such observations; {remedy}")
    if not is_class and (keywords := keywords_of(buffer_class)) is not None and not keywords >= {"device", "gamma"}:
        refuse("rollout_buffer_class", buffer_class, remedy)
