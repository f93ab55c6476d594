"""Zips of models: what they contain, whether they are whole, and which algorithm saved them."""

import base64
import contextlib
import io
import json
import os
import pathlib
import pickle
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch as th
from stable_baselines3.common.save_util import json_to_data, open_path
from stable_baselines3.common.utils import get_device

from sb3_ppo_ext.common.plain_data import NotPlainError, from_plain, to_plain_or_culprit
from sb3_ppo_ext.common.type_aliases import Kwargs, StateDict
from sb3_ppo_ext.common.validation import BadArgumentError
from sb3_ppo_ext.common.zips import checked_tensors, read_members, with_members, zipped

SavedModel = str | pathlib.Path | io.BufferedIOBase

# SB3's member with all attributes, of which it pickles those that JSON does not know, and ours with the plain form of these
_DATA, _PLAIN = "data", "sb3_ppo_ext.json"
# First attribute of a model that no other algorithm can load: other algorithms raise an error when they unpickle it.
_MARK = "_load_with_PPOExt"
# Keys of a pickled attribute in SB3's JSON
_PICKLED, _TYPE = ":serialized:", ":type:"
_STATES = {"policy.pth", "policy.optimizer.pth"}
# Tensors that are not in a state dictionary, now and in zips of SB3 before 0.9
_VARIABLES = ("pytorch_variables.pth", "tensors.pth")
_MEMBERS = {_DATA, _PLAIN, "_stable_baselines3_version", "system_info.txt"}
# Attributes that only one algorithm has -> that algorithm
_ALGORITHM_OF_ATTRIBUTE = {"_last_lstm_states": "RecurrentPPO", "cg_max_steps": "TRPO"}
# Algorithms whose models PPOExt loads
_LOADED = ("PPO", "RecurrentPPO", "MaskablePPO")
# Classes of sb3-contrib, which need not be installed -> classes of the same parameters, SB3's buffers and our policies
_MODULE_OF_RECURRENT_PPO = "sb3_contrib.common.recurrent.policies"
OF_RECURRENT_PPO = {
    (_MODULE_OF_RECURRENT_PPO, "RecurrentActorCriticPolicy"): "MlpLstmPolicy",
    (_MODULE_OF_RECURRENT_PPO, "RecurrentActorCriticCnnPolicy"): "CnnLstmPolicy",
    (_MODULE_OF_RECURRENT_PPO, "RecurrentMultiInputActorCriticPolicy"): "MultiInputLstmPolicy",
}
OF_MASKABLE_PPO = {
    ("sb3_contrib.common.maskable.policies", "MaskableActorCriticPolicy"): "MlpPolicy",
    ("sb3_contrib.common.maskable.policies", "MaskableActorCriticCnnPolicy"): "CnnPolicy",
    ("sb3_contrib.common.maskable.policies", "MaskableMultiInputActorCriticPolicy"): "MultiInputPolicy",
}
_MASKED_BUFFERS = "sb3_contrib.common.maskable.buffers"
_OF_CONTRIB = {**OF_RECURRENT_PPO, **OF_MASKABLE_PPO}
# Part of the name of the policy's module in SB3 and SB3-Contrib -> the algorithm that uses such a policy
_ALGORITHM_OF_POLICY = {
    "recurrent": "RecurrentPPO",
    "maskable": "MaskablePPO",
    "ars": "ARS",
    "crossq": "CrossQ",
    "dqn": "DQN",
    "qrdqn": "QR-DQN",
    "sac": "SAC",
    "td3": "TD3 or DDPG",
    "tqc": "TQC",
}
# Attributes that PPO has and A2C has not. One of them is enough, since a user may exclude some of them from the zip.
_OF_PPO = {"batch_size", "clip_range", "clip_range_vf", "n_epochs", "target_kl"}


class UnfitStateError(BadArgumentError, RuntimeError):
    """Parameters do not fit the model. Also a ``RuntimeError``, which PyTorch raises for most of them."""


@dataclass(frozen=True)
class ModelFile:
    """
    Content of the zip of a model. Nothing of it has been unpickled.

    :param name: Name of the file for error messages
    :param algorithm: Algorithm that saved it
    :param data: Attributes by name; those that are not JSON are in SB3's description, with their pickle
    :param plain: The plain form of the latter, as :func:`plain_attributes` makes it; ``None`` if the zip has none
    :param others: Other members by name, of which those that end in ``.pth`` are state dictionaries
    """

    name: str
    algorithm: str
    data: dict[str, Any]
    plain: dict[str, Any] | None
    others: dict[str, bytes]

    def pickled(self) -> set[str]:
        """:return: Names of the attributes that are pickled"""
        return {name for name, value in self.data.items() if _is_pickled(value)}

    def without_pickles(self, given: Iterable[str]) -> dict[str, object]:
        """
        :param given: Names of attributes that the user gives instead
        :return: All other attributes that are pickled, read from their plain form
        :raises ValueError: if one has no plain form, or is not known; a damaged plain form can also raise other errors
        """
        return {name: self._from_plain(name) for name in sorted(self.pickled() - set(given))}

    def _from_plain(self, name: str) -> Any:
        if self.plain is None:
            raise BadArgumentError(
                f"{self.name} was not saved by this version of PPOExt, and cannot be loaded with `trusted=False`. "
                "If you trust it, load it with `trusted=True`, and save it again."
            )
        try:
            return from_plain(self.plain.get(name, {"unknown": self.data[name].get(_TYPE)}))
        except NotPlainError as error:
            raise BadArgumentError(
                f"`{name}` in {self.name} is or contains {error.culprit}, which `trusted=False` does not load: give "
                f"`custom_objects={{{name!r}: ...}}`, or load it with `trusted=True` if you trust the file."
            ) from error

    def for_sb3(self, given: Iterable[str]) -> io.BytesIO:
        """
        :param given: Names of attributes that are given to SB3 as ``custom_objects``, whose pickles are left out
        :return: Zip for SB3's ``load``, without members that it does not need
        """
        names = self.pickled() & set(given)
        data = {name: None if name in names else value for name, value in self.data.items()}
        return io.BytesIO(zipped({_DATA: json.dumps(data).encode(), **self.others}))

    def states(self, device: th.device | str) -> StateDict:
        """
        :param device: Device of the tensors
        :return: State dictionaries by name, read without executing code
        """
        return {
            name.removesuffix(".pth"): th.load(io.BytesIO(content), map_location=get_device(device), weights_only=True)
            for name, content in self.others.items()
            if name.endswith(".pth") and name not in _VARIABLES
        }


def read_model(path: SavedModel, own_policies: Iterable[type] = ()) -> ModelFile:
    """
    Read a file, and check that it contains a complete model that was saved by PPO or PPOExt. Nothing is unpickled, and of the
    zip only the members of a model are read.

    :param path: Path of the zip (with or without ``.zip``), or an open file
    :param own_policies: Policy classes that PPOExt uses, so that they are not taken as a sign of another algorithm
    :return: Content of the zip
    :raises ValueError: if the zip is damaged, or was saved by another algorithm
    :raises FileNotFoundError: if there is no such file
    """
    name = str(path) if isinstance(path, str | pathlib.Path) else "the file"
    _check_is_file(path)
    file = open_path(path, "r", suffix="zip")
    try:
        with refused_if_damaged(name):
            model = _model_file(name, read_members(file, _is_read), {policy.__module__ for policy in own_policies})
            if model.algorithm not in _LOADED:
                raise BadArgumentError(
                    f"The model in {name} was saved by {model.algorithm}, not by PPOExt, {', '.join(_LOADED[:-1])} or "
                    f"{_LOADED[-1]}: load it with the `load` of that class."
                )
            if missing := _STATES - model.others.keys():
                raise zipfile.BadZipFile(f"it has no {' and no '.join(sorted(missing))}")
    finally:
        if file is not path:
            file.close()
    return model


def _check_is_file(path: SavedModel) -> None:
    if not isinstance(path, str | pathlib.Path):
        return
    path = pathlib.Path(path)
    with_suffix = path.with_name(f"{path.name}.zip")
    if path.is_dir():
        # RL Zoo has the folder of the settings beside the zip.
        example = with_suffix if with_suffix.is_file() else min(path.glob("*.zip"), default=path / "model.zip")
        raise IsADirectoryError(f"{path} is a folder: give the zip of a model, such as {example}.")
    if not path.exists() and not with_suffix.exists():
        names = f'"{path}"' if path.suffix == ".zip" else f'"{path}" or "{with_suffix}"'
        raise FileNotFoundError(f"There is no model {names}: give the path of a zip that `save` has written.")


def _is_read(member: str) -> bool:
    return member in _MEMBERS or ("/" not in member and os.path.splitext(member)[1] == ".pth")


def _model_file(name: str, members: dict[str, bytes], own_modules: set[str]) -> ModelFile:
    data, plain = json.loads(members[_DATA]), json.loads(members.get(_PLAIN, b"null"))
    if not isinstance(data, dict) or not isinstance(plain, dict | None):
        raise TypeError("its attributes have no names")
    data.pop(_MARK, None)
    others = {
        member: checked_tensors(content) if member.endswith(".pth") else content
        for member, content in members.items()
        if member not in (_DATA, _PLAIN)
    }
    return ModelFile(name, _algorithm(data, own_modules), data, plain, others)


@contextlib.contextmanager
def refused(what: str, remedy: str, left: type[ValueError] = BadArgumentError) -> Iterator[None]:
    """
    Raise errors of any type, which damaged files cause, as a ``ValueError``.

    :param what: Beginning of the message: the name of the file and what is wrong with it
    :param remedy: End of the message
    :param left: Errors that are left as they are
    """
    try:
        yield
    except left:
        raise
    except Exception as error:
        raise BadArgumentError(f"{what} ({type(error).__name__}: {error}): {remedy}") from error


def refused_if_damaged(name: str) -> contextlib.AbstractContextManager[None]:
    """
    :param name: Name of a file
    :return: Context manager that raises errors of any type as a ``ValueError`` that names the file
    """
    return refused(f"{name} is not a whole model zip", "copy it again, or load an earlier checkpoint.")


def with_plain_attributes(file: io.BytesIO, attributes: Mapping[str, object]) -> bytes:
    """
    :param file: Zip of a model, written by SB3
    :param attributes: Attributes of the model, by name
    :return: The same zip with the plain form of the attributes that SB3 has pickled
    """
    with zipfile.ZipFile(file) as archive:
        data = json.loads(archive.read(_DATA))
    plain = {name: to_plain_or_culprit(attributes[name]) for name, value in data.items() if _is_pickled(value)}
    return with_members(file, {_PLAIN: json.dumps(plain).encode()})


class _OnlyForPPOExt:
    """What cannot be unpickled."""

    def __init__(self, why: str):
        self.why = why

    def __reduce__(self) -> tuple[object, ...]:
        return refuse_other_algorithms, (self.why,)


def refuse_other_algorithms(why: str) -> NoReturn:
    """
    What SB3 calls when another algorithm loads a model that it cannot load.

    :param why: Options with which the model was saved
    :raises BadArgumentError: always
    """
    remedy = "which no other algorithm knows: load it with `sb3_ppo_ext.PPOExt.load`"
    raise BadArgumentError(f"This model was saved by PPOExt with {why}, {remedy}")


def only_for_ppo_ext(content: bytes, why: str) -> bytes:
    """
    Add an attribute that SB3 reads first, and that makes the ``load`` of other algorithms name the one to use. PPOExt drops
    it.

    :param content: Zip of a model
    :param why: Options that no other algorithm knows
    :return: Zip with this attribute
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    pickled = base64.b64encode(pickle.dumps(_OnlyForPPOExt(why))).decode()
    data = {_MARK: {_TYPE: "loaded by PPOExt alone", _PICKLED: pickled}, **json.loads(members[_DATA])}
    return zipped({**members, _DATA: json.dumps(data, indent=4).encode()})


def _is_pickled(value: object) -> bool:
    return isinstance(value, dict) and _PICKLED in value


def read_attribute(saved: Kwargs, name: str, default: Any = None) -> Any:
    """
    :param saved: Saved attributes, as in :class:`ModelFile`
    :param name: Name of the attribute
    :param default: What is returned if there is no such attribute
    :return: The saved attribute, unpickled
    """
    attribute = {name: saved.get(name, default)}
    return json_to_data(json.dumps(attribute), read_renamed(attribute)).get(name, default)


class _Unpickler(pickle.Unpickler):
    """
    Unpickler that finds classes of this package by their public name if they have moved to another module, and others in
    place of those of RecurrentPPO and MaskablePPO.
    """

    def find_class(self, module: str, name: str) -> object:
        if (module, name) in _OF_CONTRIB:
            return super().find_class("sb3_ppo_ext", _OF_CONTRIB[module, name])
        if module == _MASKED_BUFFERS:
            return super().find_class("stable_baselines3.common.buffers", "DictRolloutBuffer")
        try:
            return super().find_class(module, name)
        except (ModuleNotFoundError, AttributeError):
            if not module.startswith("sb3_ppo_ext."):
                raise
            return super().find_class("sb3_ppo_ext", name)


def read_renamed(saved: dict[str, object]) -> dict[str, object]:
    """
    Read saved attributes that refer to classes or values by names of an earlier version, of RecurrentPPO or of MaskablePPO.

    :param saved: Saved attributes, as in :class:`ModelFile`
    :return: Attributes that have changed, to be passed as ``custom_objects`` to SB3's ``load``
    """
    renamed: dict[str, object] = {}
    for name, value in saved.items():
        pickled = base64.b64decode(value.get(_PICKLED, "")) if isinstance(value, dict) else b""
        # The current `__module__` of public classes is the package itself.
        if any(module in pickled for module in (b"sb3_ppo_ext.", b"sb3_contrib.common.")):
            with contextlib.suppress(Exception):  # SB3 reports the error, unless the user replaces the attribute
                renamed[name] = _Unpickler(io.BytesIO(pickled)).load()
    if saved.get("backend") == "lean":
        renamed["backend"] = "fused"
    return renamed


def _algorithm(data: dict[str, object], own_modules: set[str]) -> str:
    for attribute, algorithm in _ALGORITHM_OF_ATTRIBUTE.items():
        if attribute in data:
            return algorithm
    policy_class = data.get("policy_class")
    module = policy_class.get("__module__", "") if isinstance(policy_class, dict) else ""
    library, *parts = module.split(".")
    if library in ("stable_baselines3", "sb3_contrib") and module not in own_modules:
        for part in parts:
            if part in _ALGORITHM_OF_POLICY:
                return _ALGORITHM_OF_POLICY[part]
    if "learning_starts" in data:
        return "an off-policy algorithm"
    if "gae_lambda" not in data:
        return "an unknown algorithm"
    return "PPO" if _OF_PPO & data.keys() else "A2C"
