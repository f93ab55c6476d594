"""Checks of a saved zip before anything is built from it, and compatibility with zips of earlier versions."""

import base64
import contextlib
import io
import json
import pathlib
import pickle
import zipfile
from collections.abc import Iterable
from typing import Any

from stable_baselines3.common.save_util import json_to_data, open_path

SavedModel = str | pathlib.Path | io.BufferedIOBase

_STATES = {"policy.pth", "policy.optimizer.pth"}
# Attributes that only one algorithm has -> that algorithm
_ALGORITHM_OF_ATTRIBUTE = {"_last_lstm_states": "RecurrentPPO", "cg_max_steps": "TRPO"}
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


def check_saved_ppo(path: SavedModel, own_policies: Iterable[type] = ()) -> dict[str, Any]:
    """
    Check that a file contains a complete model that was saved by PPO or PPOExt, without unpickling anything.

    :param path: Path of the zip (with or without ``.zip``), or an open file
    :param own_policies: Policy classes that PPOExt uses, so that they are not taken as a sign of another algorithm
    :return: Saved attributes by name; those that are not plain values are in SB3's JSON description
    :raises ValueError: if the zip is damaged, or was saved by another algorithm
    :raises FileNotFoundError: if there is no such file
    """
    file = open_path(path, "r", suffix="zip")
    try:
        members = _read_members(file)
        data = json.loads(members["data"])
        algorithm = _algorithm(data, {policy.__module__ for policy in own_policies})
        missing = _STATES - members.keys()
    except Exception as error:  # a damaged zip directory raises errors of many types
        raise ValueError(_damaged(path, f"{type(error).__name__}: {error}")) from error
    finally:
        if file is not path:
            file.close()
    if algorithm != "PPO":
        raise ValueError(
            f"The model in {_name(path)} was saved by {algorithm}, not by PPOExt or PPO: "
            "load it with the `load` of that class."
        )
    if missing:
        raise ValueError(_damaged(path, f"it has no {' and no '.join(sorted(missing))}"))
    return data


def read_policy_kwargs(saved: dict[str, Any]) -> dict[str, Any]:
    """
    :param saved: Saved attributes, as returned by :func:`check_saved_ppo`
    :return: The saved ``policy_kwargs``, unpickled
    """
    policy_kwargs = {"policy_kwargs": saved.get("policy_kwargs", {})}
    return dict(json_to_data(json.dumps(policy_kwargs), read_renamed(policy_kwargs)).get("policy_kwargs", {}))


class _Unpickler(pickle.Unpickler):
    """Unpickler that finds classes of this package by their public name if they have moved to another module."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except (ModuleNotFoundError, AttributeError):
            if not module.startswith("sb3_ppo_ext."):
                raise
            return super().find_class("sb3_ppo_ext", name)


def read_renamed(saved: dict[str, Any]) -> dict[str, Any]:
    """
    Read saved attributes that refer to classes or values by names of an earlier version, which SB3 could not load.

    :param saved: Saved attributes, as returned by :func:`check_saved_ppo`
    :return: Attributes that have changed, to be passed as ``custom_objects`` to SB3's ``load``
    """
    renamed: dict[str, Any] = {}
    for name, value in saved.items():
        pickled = base64.b64decode(value.get(":serialized:", "")) if isinstance(value, dict) else b""
        if b"sb3_ppo_ext." in pickled:  # the current `__module__` of public classes is the package itself
            with contextlib.suppress(Exception):  # SB3 reports the error, unless the user replaces the attribute
                renamed[name] = _Unpickler(io.BytesIO(pickled)).load()
    if saved.get("backend") == "lean":
        renamed["backend"] = "fused"
    return renamed


def _read_members(file: Any) -> dict[str, bytes]:
    with zipfile.ZipFile(file) as archive:
        members = {member.filename: archive.read(member) for member in archive.infolist()}
        # `read` compares checksums, but not sizes.
        for member in archive.infolist():
            if len(members[member.filename]) != member.file_size:
                raise zipfile.BadZipFile(f"{member.filename} is shorter than it says")
        return members


def _damaged(path: SavedModel, reason: str) -> str:
    return f"{_name(path)} is not a whole model zip ({reason}): copy it again, or load an earlier checkpoint."


def _algorithm(data: dict[str, Any], own_modules: set[str]) -> str:
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


def _name(path: SavedModel) -> str:
    return str(path) if isinstance(path, str | pathlib.Path) else "the file"
