"""What a saved zip holds, read before anything is built from it."""

import io
import json
import pathlib
import zipfile
from typing import Any

from stable_baselines3.common.save_util import open_path

SavedModel = str | pathlib.Path | io.BufferedIOBase

# Part of the policy's module -> the algorithm that uses such a policy
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
# Attributes -> the algorithm that has them all, the most special first
_ALGORITHM_OF_ATTRIBUTES = {
    ("_last_lstm_states",): "RecurrentPPO",
    ("clip_range", "n_epochs", "gae_lambda"): "PPO",
    ("cg_max_steps",): "TRPO",
    ("gae_lambda",): "A2C",
    ("learning_starts",): "an off-policy algorithm",
}


def check_saved_ppo(path: SavedModel) -> set[str]:
    """
    Check that a file holds a whole model, of PPO's kind, without unpickling anything.

    :param path: Path of the zip (with or without ``.zip``), or an open file
    :return: The names of the attributes it holds
    :raises ValueError: if the zip is damaged, or was saved by another algorithm
    :raises FileNotFoundError: if there is no such file
    """
    data = _read_data(path)
    algorithm = _algorithm(data)
    if algorithm != "PPO":
        raise ValueError(
            f"The model in {_name(path)} was saved by {algorithm}, not by PPOExt or PPO: "
            f"load it with the `load` of that class."
        )
    return set(data)


def _read_data(path: SavedModel) -> dict[str, Any]:
    file = open_path(path, "r", suffix="zip")
    try:
        with zipfile.ZipFile(file) as archive:
            # Reading compares the checksums, but not the sizes.
            members = {member.filename: archive.read(member) for member in archive.infolist()}
            damaged = [member.filename for member in archive.infolist() if len(members[member.filename]) != member.file_size]
            missing = [name for name in ("data", "policy.pth", "policy.optimizer.pth") if name not in members]
            if damaged or missing:
                raise zipfile.BadZipFile(f"damaged: {damaged}, missing: {missing}")
            data: dict[str, Any] = json.loads(members["data"])
            return data
    except Exception as error:  # a damaged directory raises all kinds
        raise ValueError(
            f"{_name(path)} is not a whole model zip ({error}): copy it again, or load an earlier checkpoint."
        ) from error
    finally:
        if file is not path:
            file.close()


def _algorithm(data: dict[str, Any]) -> str:
    policy_class = data.get("policy_class")
    module = policy_class.get("__module__", "") if isinstance(policy_class, dict) else ""
    for part in module.split("."):
        if part in _ALGORITHM_OF_POLICY:
            return _ALGORITHM_OF_POLICY[part]
    for attributes, algorithm in _ALGORITHM_OF_ATTRIBUTES.items():
        if data.keys() >= set(attributes):
            return algorithm
    return "an unknown algorithm"


def _name(path: SavedModel) -> str:
    return str(path) if isinstance(path, str | pathlib.Path) else "the file"
