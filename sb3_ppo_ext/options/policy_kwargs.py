"""Checks of the values in ``policy_kwargs``, and that the policy can read the observations."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor, NatureCNN
from torch import nn

from sb3_ppo_ext.common.type_aliases import Kwargs
from sb3_ppo_ext.common.user_code import is_known_module
from sb3_ppo_ext.common.validation import (
    BadArgumentError,
    check_dictionary,
    check_kwargs,
    check_sizes,
    check_type,
    described,
    hint_of_string,
    parameters_of,
    refuse,
)
from sb3_ppo_ext.options.values import Flag
from sb3_ppo_ext.policies.observation_keys import KEYWORDS as KEYS
from sb3_ppo_ext.policies.observation_keys import ObservationKeysMixin, check_keys, select_space

# Smallest height and width that the convolutions of `NatureCNN` can be applied to
MIN_IMAGE = 36
POLICY_NAMES = "give `MultiInputPolicy` for a `Dict`, `CnnPolicy` for images, `MlpPolicy` for anything else"


def _check_architecture(name: str, value: object) -> None:
    """Sizes of the hidden layers: a list, or a dictionary of lists with the keys ``pi`` and ``vf``."""
    if isinstance(value, list | tuple) and len(value) == 1 and isinstance(value[0], dict):
        value = value[0]  # the form before SB3 1.8, which it still takes
    if not isinstance(value, Mapping):
        _check_layers(name, value)
        return
    for key, sizes in value.items():
        if key not in ("pi", "vf", "qf"):  # `qf` is of other algorithms
            refuse(f"{name}[{key!r}]", sizes, 'the keys are "pi" for the actor and "vf" for the critic')
        _check_layers(f"{name}[{key!r}]", sizes)


def _check_layers(name: str, sizes: object) -> None:
    remedy = "give the sizes of the hidden layers, such as [64, 64] or dict(pi=[64, 64], vf=[64, 64])"
    if not isinstance(sizes, list | tuple) and not (isinstance(sizes, np.ndarray) and sizes.ndim == 1):
        refuse(name, sizes, remedy)
    check_sizes({f"{name}[{index}]": size for index, size in enumerate(sizes)})


def _check_activation(name: str, value: Any) -> None:
    """Classes and functions that make an activation function, a module."""
    remedy = "give a class of `torch.nn`, such as `torch.nn.ReLU`"
    check_type(name, value, Callable, remedy)  # type: ignore[arg-type]
    try:
        values = value().eval()(th.zeros(2, 2))
    except Exception as error:
        raise BadArgumentError(f"`{name}={described(value)}` is not valid: {remedy} ({error})") from error
    if getattr(values, "shape", None) != (2, 2):
        refuse(name, value, f"it changes the shape of its input; {remedy}")


def _check_factory(name: str, value: object, parent: type, remedy: str) -> None:
    """Classes that inherit from a parent, and functions that make an instance."""
    is_other_class = isinstance(value, type) and not issubclass(value, parent)
    if not callable(value) or is_other_class or isinstance(value, parent):
        refuse(name, value, remedy)


_EXTRACTOR = "give a class that inherits SB3's `BaseFeaturesExtractor`"
_OPTIMIZER = "give a class of `torch.optim`, such as `torch.optim.AdamW`"
# Checks of the keywords of SB3's policies, given name and value. Those of ours are checked by their classes.
KEYWORDS: dict[str, Callable[[str, Any], None]] = {
    "net_arch": _check_architecture,
    "activation_fn": _check_activation,
    **{name: Flag(as_sb3=True).check for name in ("ortho_init", "full_std", "use_expln", "squash_output")},
    **{name: Flag(as_sb3=True).check for name in ("share_features_extractor", "normalize_images")},
    "features_extractor_class": partial(_check_factory, parent=nn.Module, remedy=_EXTRACTOR),
    "features_extractor_kwargs": check_dictionary,
    "optimizer_class": partial(_check_factory, parent=th.optim.Optimizer, remedy=_OPTIMIZER),
    "optimizer_kwargs": check_dictionary,
}
MAY_BE_NONE = {"net_arch", "features_extractor_kwargs", "optimizer_kwargs"}


def check_policy(policy: object) -> None:
    """
    :param policy: Policy that was given to the algorithm, a name or a class
    :raises ValueError: if it is neither, or the policy of another algorithm
    """
    needed = ("forward", "evaluate_actions", "predict_values")
    if not isinstance(policy, str) and not (isinstance(policy, type) and all(hasattr(policy, name) for name in needed)):
        refuse("policy", policy, f"give a name or a class that inherits `sb3_ppo_ext.MlpPolicy`; {POLICY_NAMES}")


def check_policy_kwargs(policy_class: type[BasePolicy], policy_kwargs: Kwargs, makes_optimizer: bool) -> None:
    """
    Check the values of the keywords of SB3's policies. Those of policies of other packages are not checked.

    :param policy_class: Policy class
    :param policy_kwargs: Keyword arguments for the policy class that it knows
    :param makes_optimizer: Whether ``optimizer_kwargs`` are for the ``optimizer_class`` of the policy
    :raises ValueError: if a value is not valid
    """
    if not is_known(policy_class):
        return
    for name, value in policy_kwargs.items():
        if name in KEYWORDS and not (value is None and name in MAY_BE_NONE):
            KEYWORDS[name](name, value)
    for name, value in (policy_kwargs.get("optimizer_kwargs") or {}).items():
        if hint := hint_of_string(value):
            refuse(f"optimizer_kwargs[{name!r}]", value, f"give a number{hint}")
    if makes_optimizer and policy_kwargs.keys() & {"optimizer_class", "optimizer_kwargs"}:
        _check_optimizer(policy_kwargs)
    extractor = _argument("features_extractor_class", policy_class, policy_kwargs)
    if isinstance(extractor, type) and extractor.__module__.startswith("torch."):
        refuse("features_extractor_class", extractor, "it has no `features_dim`; inherit SB3's `BaseFeaturesExtractor`")
    kwargs = policy_kwargs.get("features_extractor_kwargs") or {}
    check_kwargs("features_extractor_kwargs", kwargs, extractor, ("observation_space",))
    if extractor in (NatureCNN, CombinedExtractor):
        check_sizes({name: kwargs[name] for name in kwargs.keys() & {"features_dim", "cnn_output_dim"}})


def is_known(policy_class: type) -> bool:
    """
    :param policy_class: Policy class
    :return: Whether neither the class nor a parent is a user's, so that keywords mean what SB3 documents
    """
    return all(is_known_module(cls.__module__) for cls in policy_class.__mro__)


def _argument(name: str, policy_class: Any, policy_kwargs: Mapping[str, object]) -> Any:
    """An argument of the policy class, or its default."""
    if name in policy_kwargs:
        return policy_kwargs[name]
    signatures = (parameters_of(cls.__init__) for cls in policy_class.__mro__ if "__init__" in vars(cls))
    return next(parameters[name].default for parameters in signatures if name in parameters)


def _check_optimizer(policy_kwargs: Kwargs) -> None:
    """Make the optimiser for two parameters, which is the only way to know whether its arguments are valid."""
    factory, kwargs = policy_kwargs.get("optimizer_class", th.optim.Adam), policy_kwargs.get("optimizer_kwargs") or {}
    if "lr" in kwargs:
        refuse("optimizer_kwargs", kwargs, "`lr` is the argument `learning_rate` of the algorithm; give it there")
    try:
        optimizer: Any = factory([nn.Parameter(th.zeros(2, 2)), nn.Parameter(th.zeros(2))], lr=1e-3, **kwargs)
    except Exception as error:
        what = f"`optimizer_class={described(factory)}` with `optimizer_kwargs={described(kwargs)}` is not valid"
        raise BadArgumentError(f"{what}: {type(error).__name__}: {error}") from error
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    needs_closure = closure is not None and closure.default is closure.empty
    if needs_closure or isinstance(optimizer, th.optim.SparseAdam):
        remedy = "PPO makes steps without a closure, from dense gradients; give another one, such as `torch.optim.AdamW`"
        refuse("optimizer_class", factory, remedy)


def check_observations(policy_class: type, policy_kwargs: Kwargs, space: spaces.Space) -> None:
    """
    Check that the features extractor of the policy can read the observations, if it is one of SB3's.

    :param policy_class: Policy class
    :param policy_kwargs: Keyword arguments for the policy class
    :param space: Observation space, with the channels of images first
    :raises ValueError: if it cannot
    """
    if not is_known(policy_class):
        return
    space = _space_of_readers(policy_class, policy_kwargs, space)
    extractor = _argument("features_extractor_class", policy_class, policy_kwargs)
    kwargs = policy_kwargs.get("features_extractor_kwargs") or {}
    normalized = kwargs.get("normalized_image", False) or not policy_kwargs.get("normalize_images", True)
    name, is_dict = policy_class.__name__, isinstance(space, spaces.Dict)
    if extractor in (FlattenExtractor, NatureCNN) and is_dict:
        refuse("policy", name, f"it reads no dictionaries, and the observation space is {space}; {POLICY_NAMES}")
    if extractor is CombinedExtractor and not is_dict:
        refuse("policy", name, f"it reads dictionaries, and the observation space is {space}; {POLICY_NAMES}")
    if extractor is CombinedExtractor:
        _check_parts(space, normalized)
    if extractor is NatureCNN:
        _check_images(name, space, normalized)


def _space_of_readers(policy_class: type[BasePolicy], policy_kwargs: Kwargs, space: Any) -> spaces.Space:
    """Space of what actor or critic read."""
    keys = tuple(policy_kwargs.get(name) for name in KEYS)
    if not issubclass(policy_class, ObservationKeysMixin) or keys == (None, None):
        return space
    check_keys(space, keys[0], keys[1])
    read = {key for part in keys for key in (space.spaces if part is None else part)}
    return select_space(space, [key for key in space.spaces if key in read])


def _check_parts(space: Any, normalized: bool) -> None:
    for key, part in space.spaces.items():
        if not isinstance(key, str) or "." in key or not key:
            refuse("observation_space", space, f"PyTorch takes no module with the name {key!r}; rename this key")
        if is_image_space(part, normalized_image=normalized):
            _check_size(f"the part {key!r} of the observation space", part)


def _check_images(policy_name: str, space: Any, normalized: bool) -> None:
    if not is_image_space(space, normalized_image=normalized):
        remedy = (
            f"it reads only images, uint8 from 0 to 255 with three dimensions, and the observation space is {space}; "
            "give `MlpPolicy`, or `policy_kwargs=dict(normalize_images=False)` for images that are scaled already"
        )
        refuse("policy", policy_name, f"You should use NatureCNN only with images: {remedy}")
    _check_size("the observation space", space)


def _check_size(what: str, space: spaces.Box) -> None:
    if min(space.shape[1:]) < MIN_IMAGE:
        remedy = (
            f"{what} has images of {space.shape[1]} x {space.shape[2]} pixels, and NatureCNN needs {MIN_IMAGE} x {MIN_IMAGE}; "
            "give larger images, or a `features_extractor_class` of your own in `policy_kwargs`"
        )
        refuse("observation_space", space, remedy)
