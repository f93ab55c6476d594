"""Saving and loading of PPOExt."""

import io
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch as th
from stable_baselines3.common.save_util import recursive_getattr
from stable_baselines3.common.type_aliases import GymEnv, TensorDict

from sb3_ppo_ext.algorithm.changed_options import ChangedOptions
from sb3_ppo_ext.common.atomic_files import write_whole
from sb3_ppo_ext.common.hybrid_actions import is_hybrid
from sb3_ppo_ext.common.plain_data import python_numbers
from sb3_ppo_ext.common.saved_models import (
    ModelFile,
    SavedModel,
    UnfitStateError,
    only_for_ppo_ext,
    read_attribute,
    read_model,
    read_renamed,
    refused,
    refused_if_damaged,
    with_plain_attributes,
)
from sb3_ppo_ext.common.type_aliases import Kwargs, StateDict
from sb3_ppo_ext.common.validation import check_device, check_known_options, check_number, refuse
from sb3_ppo_ext.envs.normalizer import has_observations
from sb3_ppo_ext.memory.policies import MlpTransformerPolicy
from sb3_ppo_ext.memory.saved_parameters import added_parameters, check_sharing, shares_transformer
from sb3_ppo_ext.options import ALL_OPTIONS
from sb3_ppo_ext.options.constructor import option_names
from sb3_ppo_ext.options.places import place_of
from sb3_ppo_ext.policies.actor_critic import (
    check_parameters_are_of,
    fixes_std,
    with_action_distributions,
    with_own_masking,
)
from sb3_ppo_ext.policies.value_normalization import without_statistics
from sb3_ppo_ext.update.optimizers import adopt_state, check_state_is_whole, check_step, keep_counts_on_host

SelfSavedState = TypeVar("SelfSavedState", bound="SavedState")
# State of options that adapt during the training, saved under these names if it exists -> the option
LEARNED = {
    "advantage_normalizer": "advantage_norm",
    "kl_coefficient": "kl_target",
    "adaptive_lr": "adaptive_lr_kl",
    "loss_scale": "amp_dtype",
    "normalizer": "normalize_obs",
}
# Options that change the parameters of the policy, or the optimiser and its state
NOT_IN_SB3 = (
    *("action_dist", "action_masking", "normalize_obs", "normalize_reward", "normalize_value"),
    *("optimizer", "weight_decay", "critic_learning_rate"),
)
# What the `policy_kwargs` of earlier zips leave out
SHARED = dict(share_features_extractor=True)
# Attributes that are created again after loading
NOT_SAVED = (
    *("_truncations", "_tensors_after", "_samples_latents", "_engines", "_interrupted", "_set_up"),
    *("_own_buffer", "_own_methods", "_device_is_automatic", "ranks", "_shared_rollout", "_before_step"),
    *("_terminal_watch", "_said", "_choice"),
)
COUNTERS = ("num_timesteps", "_total_timesteps", "_num_timesteps_at_start", "_episode_num", "_n_updates", "n_skipped_updates")
# Statistics of the last episodes, and the keys of their numbers
STATISTICS = {"ep_info_buffer": ("r", "l"), "ep_success_buffer": ()}


class SavedState(ChangedOptions):
    """An on-policy algorithm with PPOExt's options. Its zips have SB3's format and include the state of adaptive options."""

    def save(self, path: SavedModel, exclude: Iterable[str] | None = None, include: Iterable[str] | None = None) -> None:
        """
        Save all the attributes of the object and the model parameters in a zip-file. The file is replaced at once: if saving
        fails or is interrupted, the former file is kept.

        If other algorithms cannot load it, as the parameters of another action distribution, their ``load`` says so.

        :param path: path to the file where the rl agent should be saved
        :param exclude: name of parameters that should be excluded in addition to the default ones
        :param include: name of parameters that might be excluded but should be included anyway
        """
        if self.env is not None:
            self._choose_discount()  # Without environments, nobody could later.
        file = io.BytesIO()
        super().save(file, exclude, include)
        content = with_plain_attributes(file, vars(self))
        if own := self._options_of_ppo_ext_alone():
            content = only_for_ppo_ext(content, " and ".join(own))
        write_whole(path, content, suffix="zip")

    def _options_of_ppo_ext_alone(self) -> list[str]:
        """Options whose parameters or states SB3's algorithms have no place for."""
        learned = [option for learned, option in LEARNED.items() if getattr(self, learned) is not None]
        names = [name for name in dict.fromkeys([*learned, *NOT_IN_SB3]) if getattr(self, name) != ALL_OPTIONS[name].default]
        space = [f"`action_space={self.action_space}`"] if is_hybrid(self.action_space) else []
        return [*(f"`{name}={getattr(self, name)!r}`" for name in names), *space]

    @classmethod
    def load(
        cls: type[SelfSavedState],
        path: SavedModel,
        env: GymEnv | None = None,
        device: th.device | str = "auto",
        custom_objects: Kwargs | None = None,
        print_system_info: bool = False,
        force_reset: bool = True,
        *,
        trusted: bool = True,
        **kwargs: Any,
    ) -> SelfSavedState:
        """
        Load the model from a zip-file, saved by ``PPOExt``, ``stable_baselines3.PPO``, or ``RecurrentPPO`` or ``MaskablePPO``
        of ``sb3_contrib`` (which need not be installed).
        Warning: ``load`` re-creates the model from scratch, it does not update it in-place!
        For an in-place load use ``set_parameters`` instead.

        Warning: a zip can contain pickled Python objects, which may execute any code when they are loaded. Give
        ``trusted=False`` for a file from someone whom you would not let execute code on your computer.

        :param path: path to the file (or a file-like) where to load the agent from
        :param env: the new environment to run the loaded model on
            (can be None if you only need prediction from a trained model) has priority over any saved environment
        :param device: Device on which the code should run; ``"auto"`` for the fastest, see the constructor.
        :param custom_objects: Dictionary of objects to replace upon loading. What they replace is not unpickled.
        :param print_system_info: Whether to print system info from the saved model and the current system info
        :param force_reset: Force call to ``reset()`` before training to avoid unexpected behavior.
        :param trusted: Whether pickled objects may be loaded. If not, nothing of the file is executed: everything is read from
            its plain form, which ``save`` writes for all classes of SB3 and of this package, while other classes must be
            given as ``custom_objects``
        :param kwargs: options to change when loading; not those that make the policy: ``policy``, ``policy_kwargs``,
            ``use_sde``, ``action_dist``, ``action_masking``, ``optimizer``, ``normalize_value``
        :return: new model instance with loaded parameters
        :raises ValueError: if the zip is damaged or of another algorithm, or has a class that ``trusted=False`` does not load,
            or an option is unknown or not valid
        """
        check_device(device)
        custom_objects = {} if custom_objects is None else custom_objects
        if not isinstance(custom_objects, dict):
            refuse("custom_objects", custom_objects, "custom_objects argument must be a dict or None")
        saved = read_model(path, cls.policy_aliases.values())
        check_known_options(kwargs, saved.data.keys() | option_names(cls), f"{cls.__name__}.load", place_of)
        masked = saved.data.get("action_masking", saved.algorithm == "MaskablePPO")
        remedy = "create a model with it, and give that the parameters by `set_parameters`"
        _check_kept(saved.name, "action_masking", kwargs.get("action_masking", masked), masked, remedy)
        if normalized := saved.data.get("normalize_obs", False):
            _check_kept(saved.name, "normalize_obs", kwargs.get("normalize_obs", normalized), normalized, remedy)
        if "stats_window_size" in kwargs:
            # The only option with an attribute of another name
            kwargs["_stats_window_size"] = kwargs.pop("stats_window_size")
        if saved.algorithm == "MaskablePPO":
            kwargs = {"action_masking": True, **kwargs}
        with refused_if_damaged(saved.name):
            states = saved.states("cpu")  # SB3 reads them below, where errors do not name the file.
            objects = {**_read_objects(saved, custom_objects, trusted), **custom_objects}
            if _leaves_out_sharing(saved, objects, states.get("policy", {})):
                objects["policy_kwargs"] = {**SHARED, **_policy_kwargs(saved, objects)}
                if isinstance(kwargs.get("policy_kwargs"), dict):
                    kwargs["policy_kwargs"] = {**SHARED, **kwargs["policy_kwargs"]}
            action_dist, policy_kwargs = _action_dist_and_policy_kwargs(saved, objects, kwargs.get("policy_kwargs"))
            if policy_kwargs is not None and "policy_kwargs" not in custom_objects:
                kwargs, objects["policy_kwargs"] = {**action_dist, **kwargs}, policy_kwargs
            _check_names(cls, saved.data.keys() - custom_objects.keys() - (saved.pickled() if trusted else set()))
        remedy = "give `custom_objects` for what cannot be imported, or load an earlier checkpoint."
        with refused(f"{saved.name} cannot be loaded", remedy, left=ValueError):
            try:
                model = super().load(saved.for_sb3(objects), env, device, objects, print_system_info, force_reset, **kwargs)
            except UnfitStateError:
                kept = saved.data.get("use_sde", False)
                _check_kept(saved.name, "use_sde", kwargs.get("use_sde", kept), kept, "create a model with it")
                raise
            _check_policy(model, kwargs)
            _check_statistics(model)
            return model

    def set_parameters(
        self,
        load_path_or_dict: str | TensorDict,
        exact_match: bool = True,
        device: th.device | str = "auto",
        *,
        trusted: bool = True,
    ) -> None:
        """
        Load parameters from a zip-file of ``PPOExt``, ``stable_baselines3.PPO`` or sb3-contrib, see ``load``, or from a
        nested dictionary (see ``get_parameters``). If they are refused, the model is as before.

        :param load_path_or_dict: Location of the saved data (path or file-like, see ``save``), or a dictionary that
            maps the names of objects to their state-dictionaries
        :param exact_match: If True, the given parameters should include parameters for each module and each of their
            parameters, otherwise raises an Exception. If set to False, this can be used to update only specific
            parameters.
        :param device: Device on which the code should run.
        :param trusted: For symmetry with ``load``. Parameters are always read without executing anything of the file
        :raises ValueError: if the zip is damaged or of another algorithm, or the parameters do not fit the model (then it is
            a ``RuntimeError``, too, unless only their names do not match)
        """
        if isinstance(load_path_or_dict, dict):
            parameters: StateDict = dict(load_path_or_dict)
        else:
            saved = read_model(load_path_or_dict, self.policy_aliases.values())
            with refused_if_damaged(saved.name):
                parameters = saved.states(device)
        before = deepcopy(self.get_parameters())
        try:
            self._set_parameters(parameters, exact_match, device)
        except Exception as error:
            self._restore(before)
            if isinstance(error, ValueError):
                raise
            raise UnfitStateError(
                f"The parameters do not fit this model, which was not changed ({type(error).__name__}: {error})."
            ) from error

    def _set_parameters(self, parameters: StateDict, exact_match: bool, device: th.device | str) -> None:
        check_parameters_are_of(parameters.get("policy", {}), self.action_dist)
        if "policy" in parameters and not self.normalize_obs and has_observations(parameters.get("normalizer")):
            remedy = "the parameters are of a model that normalises observations; make this one with `normalize_obs=True`"
            refuse("normalize_obs", self.normalize_obs, remedy)
        if exact_match and "policy" in parameters and "normalizer" not in parameters and self._has_seen_observations():
            remedy = (
                "the parameters are of a model that does not normalise observations, and this one would do it with its own "
                "statistics; give them to a new model, or `exact_match=False`"
            )
            refuse("normalize_obs", self.normalize_obs, remedy)
        check_sharing(self.policy, parameters.get("policy", {}), "policy.optimizer" in parameters)
        if "policy" in parameters and not self.normalize_value:
            parameters["policy"] = without_statistics(parameters["policy"])
        if "policy.optimizer" in parameters:
            check_state_is_whole(parameters["policy.optimizer"])
            names = dict(self.policy.named_parameters()).keys()
            new = added_parameters(names, parameters["policy"]) if "policy" in parameters else set()
            parameters["policy.optimizer"] = adopt_state(self.policy, parameters["policy.optimizer"], new)
        for name in LEARNED:
            learner = getattr(self, name)
            if learner is None:
                parameters.pop(name, None)  # the option is off here
            elif name in parameters:
                parameters[name] = _completed(parameters[name], learner.state_dict())
                _check_form(name, parameters[name], learner.state_dict())
            elif exact_match:
                parameters[name] = learner.state_dict()  # it was off there
        super().set_parameters(parameters, exact_match, device)
        if "policy.optimizer" in parameters:
            keep_counts_on_host(self.policy.optimizer)
            check_step(self.policy.optimizer)

    def _has_seen_observations(self) -> bool:
        """Whether the model normalises observations with statistics of some."""
        state = {} if self.normalizer is None else self.normalizer.state_dict()
        return any(name.startswith("obs_rms") and max(state[name]["count"]) >= 1 for name in state)

    def _restore(self, states: StateDict) -> None:
        for name, state in states.items():
            part = recursive_getattr(self, name)
            getattr(part, "_orig_mod", part).load_state_dict(state)

    def get_parameters(self) -> dict[str, dict[str, object]]:
        """
        Return the parameters of the agent. This includes parameters from different networks, e.g.
        critics (value functions) and policies (pi functions).

        :return: Mapping from names of the objects to PyTorch state-dicts.
        """
        # A callback may have set a learning rate of NumPy's type, which could be saved, but not be loaded.
        return {name: python_numbers(state) for name, state in super().get_parameters().items()}

    def __getstate__(self) -> StateDict:
        """State without engines, since these use the memory of one policy. Copies and unpickled models create their own."""
        return {**vars(self), "_engines": {}, "_choice": None}

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        state_dicts, variables = super()._get_torch_save_params()
        return [*state_dicts, *(name for name in LEARNED if getattr(self, name) is not None)], variables

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), *LEARNED, *NOT_SAVED]


def _read_objects(saved: ModelFile, given: dict[str, object], trusted: bool) -> dict[str, object]:
    """Attributes that SB3 cannot read, or is not to unpickle."""
    if trusted:
        return read_renamed({name: value for name, value in saved.data.items() if name not in given})
    return saved.without_pickles(given)


def _action_dist_and_policy_kwargs(saved: ModelFile, objects: Kwargs, given: Kwargs | None) -> tuple[Kwargs, Kwargs | None]:
    """
    Options and ``policy_kwargs`` that replace those of a zip. In zips of SB3's algorithms with our policies, the action
    distribution is part of ``policy_kwargs``; it is moved to the options. ``policy_kwargs`` given to ``load`` are accepted if
    they only fix the standard deviation, while SB3 accepts no change.

    :param saved: Content of the zip
    :param objects: Attributes that replace those in the zip
    :param given: ``policy_kwargs`` given to ``load``, ``None`` for those of the zip
    :return: Options of the action distribution, and new ``policy_kwargs``, ``None`` if they do not change
    """
    names = {"action_dist", "deterministic_action"}
    if given is None and not saved.data.get("policy_kwargs", {}).keys() & names:
        return {}, None
    policy_kwargs = _policy_kwargs(saved, objects)
    named: Kwargs = {name: policy_kwargs.pop(name) for name in policy_kwargs.keys() & names}
    return named, given if fixes_std(policy_kwargs, given) else policy_kwargs


def _policy_kwargs(saved: ModelFile, objects: Kwargs) -> Kwargs:
    return dict(objects["policy_kwargs"] if "policy_kwargs" in objects else read_attribute(saved.data, "policy_kwargs", {}))


def _leaves_out_sharing(saved: ModelFile, objects: Kwargs, state: Mapping[str, th.Tensor]) -> bool:
    """
    :param saved: Content of the zip
    :param objects: Attributes that replace those in the zip
    :param state: Parameters of its policy
    :return: Whether it is of a ``MlpTransformerPolicy`` from when actor and critic shared a transformer by default, so that
        its ``policy_kwargs`` need not say so
    """
    if not shares_transformer(state) or SHARED.keys() & _policy_kwargs(saved, objects).keys():
        return False
    policy_class = objects["policy_class"] if "policy_class" in objects else read_attribute(saved.data, "policy_class")
    # A class with a constructor of its own may have decided itself, and may not take the keyword.
    return getattr(policy_class, "__init__", None) is MlpTransformerPolicy.__init__


def _check_kept(zip_name: str, name: str, value: object, kept: object, remedy: str) -> None:
    """Refuse to change an option that decides which parameters a policy has, or what it observes."""
    if value != kept:
        refuse(name, value, f"{zip_name} was saved with `{name}={kept}`, which `load` cannot change; {remedy}")


def _check_policy(model: SavedState, given: Mapping[str, object]) -> None:
    """Refuse another policy than that of the zip, which SB3 would ignore."""
    policy = given.get("policy", model.policy_class)
    named = model.policy_aliases.get(policy) if isinstance(policy, str) else policy
    if with_action_distributions(with_own_masking(named)) is not with_action_distributions(model.policy_class):
        refuse(
            "policy", policy, f"that of the model is {model.policy_class.__name__}, which `load` cannot change; leave it out"
        )


def _check_names(algorithm: type[SavedState], names: Iterable[str]) -> None:
    """Refuse attributes that would hide methods."""
    for name in names:
        if callable(getattr(algorithm, name, None)):
            refuse("attribute", name, "it would hide a method")


def _check_statistics(model: SavedState) -> None:
    """Refuse counters and statistics of episodes that are not numbers."""
    for name in COUNTERS:
        # SB3 trains for `1e5` steps, too.
        check_number(name, getattr(model, name), 0, integer=name != "_total_timesteps")
    for name, keys in STATISTICS.items():
        for each in getattr(model, name) or ():
            values = [each[key] for key in keys] if keys else [each]
            if not all(map(_is_number, values)):
                refuse(name, each, "give numbers")


def _is_number(value: object) -> bool:
    """Environments give arrays and tensors with one number as well, of which SB3 takes the mean."""
    if isinstance(value, th.Tensor):
        return value.numel() == 1 and not value.is_complex()
    if isinstance(value, np.ndarray):
        return value.size == 1 and value.dtype.kind in "biuf"
    return isinstance(value, int | float | np.number | np.bool_)


def _completed(state: Any, own: Mapping[str, object]) -> Any:
    """The state with what zips of before did not have: whether statistics are updated."""
    return {"training": True, **state} if "training" in own and isinstance(state, dict) else state


def _check_form(name: str, state: object, own: object) -> None:
    """Refuse a state that has not the same keys and lengths as the learner's own, or has anything but finite numbers."""
    if isinstance(own, dict):
        if not isinstance(state, dict) or state.keys() != own.keys():
            refuse(name, state, f"it must have the keys {', '.join(own)}")
        for key in own:
            _check_form(f"{name}.{key}", state[key], own[key])
    elif isinstance(own, list):
        if not isinstance(state, list | tuple) or len(state) != len(own):
            refuse(name, state, f"give {len(own)} numbers")
        for each in state:
            _check_float64(name, each)
    elif not isinstance(own, bool):
        _check_float64(name, state)


def _check_float64(name: str, value: object) -> None:
    """Refuse what is not a finite number; averages of squares may be larger than the options of a model."""
    largest = sys.float_info.max
    check_number(name, value, -largest, largest, infinite=True)


class _OfTheClass(classmethod):
    """A class method that makes a new model, and says so if it is called on a model, which stays as it is."""

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        method = super().__get__(None, type(instance) if owner is None else owner)
        return method if instance is None else partial(_warned, method)


def _warned(method: Callable[..., object], *args: object, **kwargs: object) -> object:
    warnings.warn(
        "`load` is a class method: it returns a new model, and leaves this one as it is. Write `model = PPOExt.load(path)`, "
        "or `model.set_parameters(path)` to change this one.",
        stacklevel=2,
    )
    return method(*args, **kwargs)


SavedState.load = _OfTheClass(SavedState.load.__func__)  # type: ignore
