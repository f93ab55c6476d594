"""Upload to the Hub, and download from it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from stable_baselines3.common.type_aliases import GymEnv
from stable_baselines3.common.vec_env import VecEnv

from sb3_ppo_ext.common.validation import check_type, refuse
from sb3_ppo_ext.hub.folder import CONFIG, PICKLED_STATISTICS, PLAIN_STATISTICS, load_folder, save_folder
from sb3_ppo_ext.ppo_ext import PPOExt


def push_to_hub(
    model: PPOExt | str | Path,
    repo_id: str,
    *,
    private: bool = False,
    token: str | None = None,
    commit_message: str = "Add a model of PPOExt",
    **kwargs: Any,
) -> str:
    """
    Upload a model to the Hugging Face Hub, with a model card: returns, plot, command, options and versions.

    :param model: Trained model, or a folder that :func:`save_folder` has written
    :param repo_id: Repository, ``"user/name"``, which is made if it does not exist. RL Zoo finds ``"user/ppo_ext-ENV_ID"``
    :param private: Whether a new repository is private
    :param token: Token with the right to write; ``None`` for that of ``hf auth login``
    :param commit_message: Message of the commit
    :param kwargs: Arguments of :func:`save_folder`: ``env``, ``env_id``, ``runs``, ``n_eval_episodes``, ...
    :return: Address of the repository
    :raises ValueError: if an argument is not valid; nothing has been uploaded then
    :raises ImportError: if huggingface_hub is not installed
    """
    hub = _huggingface_hub()
    _check_repository(repo_id)
    if not isinstance(model, PPOExt):
        folder = Path(model)
        if not (folder / CONFIG).is_file() or not (folder / "README.md").is_file():
            refuse("model", str(model), "give a model, or a folder that `save_folder` has written")
        if kwargs:
            refuse(next(iter(kwargs)), next(iter(kwargs.values())), "give it to `save_folder`, which has written the folder")
        return _upload(hub, folder, repo_id, private, token, commit_message)
    with tempfile.TemporaryDirectory() as temporary:
        folder = save_folder(model, Path(temporary) / "model", repo_id=repo_id, **kwargs)
        return _upload(hub, folder, repo_id, private, token, commit_message)


def load_from_hub(
    repo_id: str,
    env: GymEnv | str | None = None,
    *,
    trusted: bool = False,
    filename: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    **kwargs: object,
) -> tuple[PPOExt, VecEnv | None]:
    """
    Download a model from the Hugging Face Hub. Nothing of its files is executed, unless they are trusted.

    :param repo_id: Repository, ``"user/name"``
    :param env: Environment, without ``VecNormalize``, or its id; ``None`` for one that is made from the id in the repository
    :param trusted: Whether pickled objects may be loaded, which can execute any code; see ``PPOExt.load``. Models that RL Zoo
        or huggingface_sb3 have uploaded for SB3's PPO need it
    :param filename: Name of the model's zip in the repository; ``None`` if there is one only
    :param revision: Branch, tag or commit; ``None`` for the newest
    :param token: Token for a private repository
    :param kwargs: Further arguments of ``PPOExt.load``, such as ``device`` and ``custom_objects``
    :return: The model and its environment, as for :func:`load_folder`
    :raises ValueError: see :func:`load_folder`
    :raises ImportError: if huggingface_hub is not installed
    """
    hub = _huggingface_hub()
    _check_repository(repo_id)
    # The pickle is downloaded so that a normalisation is not missed; it is not opened without trust.
    patterns = [CONFIG, PLAIN_STATISTICS, PICKLED_STATISTICS, filename or "*.zip"]
    folder = hub.snapshot_download(repo_id, revision=revision, token=token, allow_patterns=patterns)
    return load_folder(folder, env, trusted=trusted, filename=filename, **kwargs)


def _upload(hub: ModuleType, folder: Path, repo_id: str, private: bool, token: str | None, commit_message: str) -> str:
    api = hub.HfApi(token=token)
    address = api.create_repo(repo_id, private=private, exist_ok=True)
    api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=commit_message)
    return str(address)


def _check_repository(repo_id: object) -> None:
    check_type("repo_id", repo_id, str, 'give "user/name"')
    if not all(str(repo_id).partition("/")[::2]) or str(repo_id).count("/") != 1:
        refuse("repo_id", repo_id, 'give "user/name"')


def _huggingface_hub() -> ModuleType:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError("huggingface_hub is not installed: `pip install 'sb3-ppo-ext[hub]'`") from error
    return huggingface_hub
