"""Saving and loading of policies without their algorithm."""

import io
import json
import pathlib
from typing import Any, TypeVar

import torch as th
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.save_util import open_path
from stable_baselines3.common.utils import get_device

from sb3_ppo_ext.common.atomic_files import write_whole
from sb3_ppo_ext.common.plain_data import NotPlainError, from_plain, to_plain_or_culprit
from sb3_ppo_ext.common.saved_models import SavedModel, refused
from sb3_ppo_ext.common.validation import BadArgumentError
from sb3_ppo_ext.common.zips import checked_tensors, read_members, with_members

SelfSavedPolicy = TypeVar("SelfSavedPolicy", bound="SavedPolicy")
# Members that are added to the zip that `torch.save` writes, in the folder in which PyTorch expects all of them
_ARGUMENTS, _PARAMETERS = "archive/sb3_ppo_ext.json", "archive/state_dict.pth"


class SavedPolicy(ActorCriticPolicy):
    """An actor-critic policy whose files are those of SB3's policies, and can also be read without unpickling."""

    def save(self, path: SavedModel) -> None:
        """
        Save model to a given location. The file is replaced at once: if saving fails or is interrupted, the former file is
        kept.

        :param path: Path of the file, or an open file
        """
        arguments, parameters = self._get_constructor_parameters(), self.state_dict()
        del arguments["lr_schedule"]  # a function of SB3 in place of a schedule
        further = {
            _ARGUMENTS: json.dumps({name: to_plain_or_culprit(value) for name, value in arguments.items()}).encode(),
            _PARAMETERS: _saved(parameters).getvalue(),
        }
        write_whole(
            path, with_members(_saved({"state_dict": parameters, "data": self._get_constructor_parameters()}), further)
        )

    @classmethod
    def load(
        cls: type[SelfSavedPolicy], path: SavedModel, device: th.device | str = "auto", *, trusted: bool = True
    ) -> SelfSavedPolicy:
        """
        Load model from path.

        Warning: the file contains pickled Python objects, which may execute any code when they are loaded. Give
        ``trusted=False`` for a file from someone whom you would not let execute code on your computer.

        :param path: Path of the file, or an open file
        :param device: Device on which the policy should be loaded.
        :param trusted: Whether pickled objects may be loaded. If not, the policy is read from its plain form, which has the
            classes of SB3 and of this package only
        :return: The policy
        :raises ValueError: if the file is damaged, or ``trusted=False`` and it has another class or no plain form
        :raises FileNotFoundError: if there is no such file
        """
        file: Any = open_path(path, "r")
        name = str(path) if isinstance(path, str | pathlib.Path) else "the file"
        remedy = "copy it again, or load an earlier one."
        try:
            with refused(f"{name} is not a policy that can be loaded", remedy):
                return super().load(file, device) if trusted else cls._load_plain(file, name, device)
        finally:
            if file is not path:
                file.close()

    @classmethod
    def _load_plain(cls: type[SelfSavedPolicy], file: Any, name: str, device: th.device | str) -> SelfSavedPolicy:
        members = read_members(file, {_ARGUMENTS, _PARAMETERS}.__contains__)
        if len(members) < 2:
            raise BadArgumentError(
                f"{name} was not saved by a policy of this version of PPOExt, and cannot be loaded with `trusted=False`. "
                "If you trust it, load it with `trusted=True`, and save it again."
            )
        try:
            arguments = {key: from_plain(plain) for key, plain in json.loads(members[_ARGUMENTS]).items()}
        except NotPlainError as error:
            raise BadArgumentError(
                f"The policy in {name} has {error.culprit}, which `trusted=False` does not load: load it with `trusted=True` "
                "if you trust the file."
            ) from error
        policy = cls(lr_schedule=cls._dummy_schedule, **arguments)
        parameters = io.BytesIO(checked_tensors(members[_PARAMETERS]))
        policy.load_state_dict(th.load(parameters, map_location=get_device(device), weights_only=True))
        return policy.to(get_device(device))


def _saved(value: object) -> io.BytesIO:
    file = io.BytesIO()
    th.save(value, file)
    return file
