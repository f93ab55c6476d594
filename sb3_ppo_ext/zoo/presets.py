"""Tuned hyperparameters from Python: the model and the environments that RL Zoo would train."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
from argparse import Namespace
from pathlib import Path
from typing import Any

import gymnasium as gym
from stable_baselines3.common.vec_env import VecEnv

from sb3_ppo_ext.common.validation import check_number, check_type, refuse, unknown_environments_as_value_errors
from sb3_ppo_ext.ppo_ext import PPOExt
from sb3_ppo_ext.zoo.experiment import make_model
from sb3_ppo_ext.zoo.registration import register
from sb3_ppo_ext.zoo.yaml_entries import HYPERPARAMS, TEMPLATES


def make(
    env_id: str,
    n_envs: int | None = None,
    seed: int | None = None,
    vec_env_cls: type[VecEnv] | None = None,
    env_kwargs: dict[str, Any] | None = None,
    device: str = "auto",
    verbose: int = 0,
    tensorboard_log: str | None = None,
    **hyperparams: Any,
) -> tuple[PPOExt, VecEnv]:
    """
    Make the model and the environments that ``rl_zoo3 train --algo ppo_ext --env ENV_ID`` begins with. Their hyperparameters
    are the entry of the environment in ``ppo_ext.yml`` or in RL Zoo's ``ppo.yml``, or else ``default``, whose policy is chosen
    by the observation space. It needs RL Zoo: ``pip install "sb3-ppo-ext[zoo]"``.

    With ``normalize`` in the entry, the environments are wrapped into a ``VecNormalize``; evaluate in another one that has its
    statistics, with ``training=False, norm_reward=False``. The number of time steps for which the entry was tuned is
    ``presets()[env_id]["n_timesteps"]``.

    :param env_id: Gymnasium's id of the environment, such as ``"CartPole-v1"``, or with the module that registers it, such as
        ``"package.module:Task-v0"``
    :param n_envs: Number of environments, at least 1; ``None`` for that of the entry
    :param seed: Seed of the model and of the environments; ``None`` for none
    :param vec_env_cls: Class of the vectorised environments, such as ``ParallelVecEnv``; ``None`` for ``FastDummyVecEnv``
    :param env_kwargs: Keyword arguments of the environment
    :param device: Device of the policy, as in SB3
    :param verbose: 1 to print hyperparameters and training logs, 0 for neither
    :param tensorboard_log: Folder for TensorBoard; ``None`` for no log
    :param hyperparams: Hyperparameters that replace those of the entry, as ``-params`` does: those of ``PPOExt``, and those of
        RL Zoo, such as ``normalize``, ``frame_stack`` and ``env_wrapper``
    :return: The model, which has not been trained, and its environments
    :raises ValueError: if there is no such environment, or an argument is not valid
    :raises ImportError: if RL Zoo is not installed
    """
    register()
    importlib.import_module("rl_zoo3.import_envs")  # registers the environments of other packages
    manager: Any = importlib.import_module("rl_zoo3.exp_manager").ExperimentManager
    env_id = _registered(env_id)
    _check(env_id, n_envs, vec_env_cls)
    _check_arguments_of_environments(env_kwargs, seed)
    check_number("verbose", verbose, 0, integer=True)
    seed = None if seed is None else int(seed)  # Gymnasium takes none of NumPy's.
    given = hyperparams if n_envs is None else {**hyperparams, "n_envs": int(n_envs)}
    experiment = manager(
        Namespace(), "ppo_ext", env_id, "", hyperparams=given, env_kwargs=env_kwargs, seed=seed, device=device, verbose=verbose
    )
    if vec_env_cls is not None:
        experiment.vec_env_class = experiment.default_vec_env_cls = vec_env_cls
    with contextlib.nullcontext() if verbose else contextlib.redirect_stdout(io.StringIO()):
        return make_model(experiment, tensorboard_log)


def _registered(env_id: Any) -> Any:
    """The id alone, after the import of the module in front of it."""
    module, colon, name = env_id.rpartition(":") if isinstance(env_id, str) else ("", "", "")
    if not colon:
        return env_id
    try:
        importlib.import_module(module)
    except ImportError as error:
        refuse("env_id", env_id, f"the module in front of the colon cannot be imported ({error})")
    return name


def _check(env_id: str, n_envs: int | None, vec_env_cls: Any) -> None:
    check_type("env_id", env_id, str, "give the id of an environment of Gymnasium")
    with unknown_environments_as_value_errors(env_id):
        gym.spec(env_id)
    if n_envs is not None:
        check_number("n_envs", n_envs, 1, integer=True)
    if vec_env_cls is not None and not (isinstance(vec_env_cls, type) and issubclass(vec_env_cls, VecEnv)):
        refuse("vec_env_cls", vec_env_cls, "give a class of vectorised environments, such as `ParallelVecEnv`")


def _check_arguments_of_environments(env_kwargs: Any, seed: Any) -> None:
    if env_kwargs is not None:
        check_type("env_kwargs", env_kwargs, dict, "give a dictionary")
    if seed is not None:
        check_number("seed", seed, 0, integer=True)


def presets() -> dict[str, dict[str, Any]]:
    """
    :return: Hyperparameters by environment: all entries of ``ppo_ext.yml``, with ``default`` for environments without an entry
        of their own, ``memory`` for transformer policies and ``recurrent`` for LSTM policies; and, where RL Zoo is installed,
        its tuned entries for PPO of the other environments
    :raises ImportError: if PyYAML is not installed, which comes with RL Zoo
    """
    ours = _read(HYPERPARAMS)
    theirs: dict[str, dict[str, Any]] = {}
    with contextlib.suppress(ImportError):
        zoo = Path(str(importlib.import_module("rl_zoo3").__file__)).parent
        folder = zoo if (zoo / "hyperparams").is_dir() else zoo.parent  # in a source checkout, they lie beside the package
        theirs = _read(folder / "hyperparams" / "ppo.yml")
    return {name: entry for name, entry in {**theirs, **ours}.items() if name not in TEMPLATES}


def _read(path: Path) -> dict[str, dict[str, Any]]:
    if importlib.util.find_spec("yaml") is None:
        raise ImportError(
            "PyYAML is not installed: `pip install pyyaml`, or `pip install 'sb3-ppo-ext[zoo]'` for `make` as well"
        )
    yaml: Any = importlib.import_module("yaml")
    return {name: dict(entry) for name, entry in yaml.safe_load(path.read_text(encoding="utf-8")).items()}
