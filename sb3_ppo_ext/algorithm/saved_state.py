"""Saving and loading of PPOExt."""

import inspect
import io
import zipfile
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch as th
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.save_util import load_from_zip_file
from stable_baselines3.common.type_aliases import GymEnv, TensorDict

from sb3_ppo_ext.common.atomic_files import write_whole
from sb3_ppo_ext.common.saved_models import SavedModel, check_saved_ppo, read_policy_kwargs, read_renamed
from sb3_ppo_ext.common.validation import check_device, check_known_options
from sb3_ppo_ext.options import PPOExtOptions
from sb3_ppo_ext.policies.actor_critic import check_parameters_are_of, fixes_std
from sb3_ppo_ext.update.optimizers import adopt_state

SelfSavedState = TypeVar("SelfSavedState", bound="SavedState")
# State of options that adapt during the training, saved under these names if it exists
LEARNED = ("advantage_normalizer", "kl_coefficient", "adaptive_lr")
# Attributes that are created again after loading
NOT_SAVED = ("_truncations", "_samples_latents", "_engines")


class SavedState(PPOExtOptions, OnPolicyAlgorithm):
    """An on-policy algorithm with PPOExt's options. Its zips have SB3's format and include the state of adaptive options."""

    def save(self, path: SavedModel, exclude: Iterable[str] | None = None, include: Iterable[str] | None = None) -> None:
        """
        Save all the attributes of the object and the model parameters in a zip-file. The file is replaced at once: if saving
        fails or is interrupted, the former file is kept.

        :param path: path to the file where the rl agent should be saved
        :param exclude: name of parameters that should be excluded in addition to the default ones
        :param include: name of parameters that might be excluded but should be included anyway
        """
        save_zip(self, path, {}, exclude, include)

    @classmethod
    def load(
        cls: type[SelfSavedState],
        path: SavedModel,
        env: GymEnv | None = None,
        device: th.device | str = "auto",
        custom_objects: dict[str, Any] | None = None,
        print_system_info: bool = False,
        force_reset: bool = True,
        **kwargs: Any,
    ) -> SelfSavedState:
        """
        Load the model from a zip-file, saved by ``PPOExt`` or by ``stable_baselines3.PPO``.
        Warning: ``load`` re-creates the model from scratch, it does not update it in-place!
        For an in-place load use ``set_parameters`` instead.

        :param path: path to the file (or a file-like) where to load the agent from
        :param env: the new environment to run the loaded model on
            (can be None if you only need prediction from a trained model) has priority over any saved environment
        :param device: Device on which the code should run.
        :param custom_objects: Dictionary of objects to replace upon loading.
        :param print_system_info: Whether to print system info from the saved model and the current system info
        :param force_reset: Force call to ``reset()`` before training to avoid unexpected behavior.
        :param kwargs: options to change when loading
        :return: new model instance with loaded parameters
        :raises ValueError: if the zip is damaged or of another algorithm, or an option is unknown or not valid
        """
        check_device(device)
        saved = check_saved_ppo(path, cls.policy_aliases.values())
        check_known_options(kwargs, saved.keys() | option_names(cls), f"{cls.__name__}.load")
        given = custom_objects if isinstance(custom_objects, dict) else {}
        replaced = read_renamed({name: value for name, value in saved.items() if name not in given})
        action_dist, policy_kwargs = _action_dist_and_policy_kwargs(saved, kwargs.get("policy_kwargs"))
        if policy_kwargs is not None:
            kwargs, replaced["policy_kwargs"] = {**action_dist, **kwargs}, policy_kwargs
        if custom_objects is None or isinstance(custom_objects, dict):  # SB3 refuses anything else
            custom_objects = {**replaced, **(custom_objects or {})}
        if "stats_window_size" in kwargs:
            # The only option with an attribute of another name
            kwargs["_stats_window_size"] = kwargs.pop("stats_window_size")
        return super().load(path, env, device, custom_objects, print_system_info, force_reset, **kwargs)

    def set_parameters(
        self, load_path_or_dict: str | TensorDict, exact_match: bool = True, device: th.device | str = "auto"
    ) -> None:
        """
        Load parameters from a zip-file of ``PPOExt`` or ``stable_baselines3.PPO``, or from a nested dictionary
        (see ``get_parameters``).

        :param load_path_or_dict: Location of the saved data (path or file-like, see ``save``), or a dictionary that
            maps the names of objects to their state-dictionaries
        :param exact_match: If True, the given parameters should include parameters for each module and each of their
            parameters, otherwise raises an Exception. If set to False, this can be used to update only specific
            parameters.
        :param device: Device on which the code should run.
        :raises ValueError: if the zip is damaged or of another algorithm, or the names do not match
        """
        if isinstance(load_path_or_dict, dict):
            parameters: dict[str, Any] = dict(load_path_or_dict)
        else:
            check_saved_ppo(load_path_or_dict, self.policy_aliases.values())
            parameters = dict(load_from_zip_file(load_path_or_dict, device=device, load_data=False)[1])
        check_parameters_are_of(parameters.get("policy", {}), self.action_dist)
        if "policy.optimizer" in parameters:
            parameters["policy.optimizer"] = adopt_state(self.policy, parameters["policy.optimizer"])
        for name in LEARNED:
            learner = getattr(self, name)
            if learner is None:
                parameters.pop(name, None)  # the option is off here
            elif exact_match:
                parameters.setdefault(name, learner.state_dict())  # it was off there
        super().set_parameters(parameters, exact_match, device)

    def __getstate__(self) -> dict[str, Any]:
        """State without engines, since these use the memory of one policy. Copies and unpickled models create their own."""
        return {**vars(self), "_engines": {}}

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        state_dicts, variables = super()._get_torch_save_params()
        return [*state_dicts, *(name for name in LEARNED if getattr(self, name) is not None)], variables

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), *LEARNED, *NOT_SAVED]


def save_zip(
    model: SavedState,
    path: SavedModel,
    extra: Mapping[str, bytes],
    exclude: Iterable[str] | None = None,
    include: Iterable[str] | None = None,
) -> None:
    """
    Save a model as ``model.save`` does, with further members in the zip, which ``load`` ignores.

    :param model: Model to save
    :param path: Path of the zip, or an open file
    :param extra: Content of the further members, by name; names that end in ``.pth`` are those of state dictionaries
    :param exclude: Names of attributes that are not saved
    :param include: Names of attributes that are saved although they usually are not
    """
    file = io.BytesIO()
    OnPolicyAlgorithm.save(model, file, exclude, include)
    with zipfile.ZipFile(file, "a") as archive:
        for name, content in extra.items():
            archive.writestr(name, content)
    write_whole(path, file.getbuffer(), suffix="zip")


def _action_dist_and_policy_kwargs(saved: dict[str, Any], given: Any) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """
    Options and ``policy_kwargs`` that replace those of a zip. In zips of SB3's algorithms with our policies, the action
    distribution is part of ``policy_kwargs``; it is moved to the options. ``policy_kwargs`` given to ``load`` are accepted if
    they only fix the standard deviation, while SB3 accepts no change.

    :param saved: Saved attributes, as returned by ``check_saved_ppo``
    :param given: ``policy_kwargs`` given to ``load``, ``None`` for those of the zip
    :return: Options of the action distribution, and new ``policy_kwargs``, ``None`` if they do not change
    """
    names = {"action_dist", "deterministic_action"}
    if given is None and not saved.get("policy_kwargs", {}).keys() & names:
        return {}, None
    policy_kwargs = read_policy_kwargs(saved)
    named: dict[str, Any] = {name: policy_kwargs.pop(name) for name in policy_kwargs.keys() & names}
    return named, given if fixes_std(policy_kwargs, given) else policy_kwargs


def option_names(algorithm: type[SavedState]) -> set[str]:
    """
    :param algorithm: ``PPOExt`` or a subclass, which may pass keyword arguments on to its parents
    :return: Names of all arguments of the constructors of the class and its parents
    """
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    classes = [cls for cls in algorithm.__mro__ if issubclass(cls, SavedState) and cls is not SavedState]
    parameters: Iterable[inspect.Parameter] = (p for c in classes for p in inspect.signature(c.__init__).parameters.values())
    return {p.name for p in parameters if p.kind in kinds} - {"self"}
