"""Resume an interrupted training of RL Zoo: ``python -m sb3_ppo_ext.zoo resume FOLDER``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sb3_ppo_ext.checkpoints.training_checkpoint import TrainingCheckpoint
from sb3_ppo_ext.checkpoints.training_state import is_checkpoint, read_checkpoint
from sb3_ppo_ext.common.type_aliases import Kwargs
from sb3_ppo_ext.common.validation import BadArgumentError, refuse
from sb3_ppo_ext.zoo.atomic_saving import make_atomic
from sb3_ppo_ext.zoo.distributed_runs import create_zoo_callbacks
from sb3_ppo_ext.zoo.run_folder import CHECKPOINTS, RESUMED
from sb3_ppo_ext.zoo.yaml_entries import read_saved

if TYPE_CHECKING:
    from rl_zoo3.exp_manager import ExperimentManager
    from stable_baselines3.common.vec_env import VecEnv

# Names of the algorithm in the Zoo; the second is the one that the Zoo derives from the class for the Hub.
NAMES = ("ppo_ext", "ppoext")
# Arguments of the Zoo's `train` that are not given again: the file with the hyperparameters has what they led to.
_NOT_REPEATED = {"hyperparams", "conf_file", "trial_id", "storage", "study_name", "uuid", "trained_agent"}
_NOT_REPEATED |= {"truncate_last_trajectory", "command", "saved_hyperparams"}


def arguments_to_resume(folder: str | Path) -> list[str]:
    """
    Prepare this process to resume a run in its own folder: change to the folder in which the run was started, if that is
    known, and let the Zoo's ``train`` find the run.

    :param folder: Folder of the run, such as ``logs/ppo_ext/CartPole-v1_1``
    :return: Arguments for the Zoo's ``train``
    :raises ValueError: if it is not the folder of a training run that can be resumed
    """
    folder = Path(folder).resolve()
    found = sorted(folder.glob("*/args.yml"))
    if len(found) != 1:
        refuse("folder", str(folder), "give the folder of one run, such as logs/ppo_ext/CartPole-v1_1")
    arguments = read_saved(found[0])
    if arguments["algo"] not in NAMES or arguments["optimize_hyperparameters"]:
        refuse("folder", str(folder), "only training runs of `ppo_ext` can be resumed")
    if not (folder / CHECKPOINTS).is_dir():
        refuse("folder", str(folder), "it has no checkpoint; `--save-freq` of `train` lets a training run write them")
    RESUMED.set(folder)
    _change_to_start(folder, arguments)
    return [word for name, value in arguments.items() if name not in _NOT_REPEATED for word in words_of(name, value)]


def _change_to_start(folder: Path, arguments: Kwargs) -> None:
    """Paths among the arguments are relative to the folder in which the run was started."""
    inner = Path(arguments["log_folder"], arguments["algo"], folder.name)
    if not inner.is_absolute() and folder.parts[-len(inner.parts) :] == inner.parts:
        os.chdir(Path(*folder.parts[: -len(inner.parts)]))


def words_of(name: str, value: object) -> Iterator[str]:
    """
    :param name: Name of an argument of the Zoo's ``train``
    :param value: Its value
    :return: Words of the command line that give it this value
    """
    option = f"--{name.replace('_', '-')}"
    if isinstance(value, dict | list):
        if value:
            yield option
        yield from (f"{key}:{part!r}" for key, part in value.items()) if isinstance(value, dict) else map(str, value)
    elif value is True:
        yield option
    elif value is not None and value is not False and value != "":
        yield f"{option}={value}"


def find_run(experiment: ExperimentManager) -> None:
    """
    Let an experiment continue in the folder of the run that is resumed, with its newest whole checkpoint.

    :param experiment: Experiment before its setup
    """
    if (folder := RESUMED.get()) is None:
        return
    experiment.save_path = str(folder)
    experiment.params_path = f"{folder}/{experiment.env_name}"
    experiment.continued_agent = read_saved(Path(experiment.params_path, "args.yml")).get("trained_agent")  # type: ignore[attr-defined]
    with unreadable_checkpoints_as_bad_arguments():
        experiment.trained_agent = str(read_checkpoint(folder / CHECKPOINTS)[0])
    experiment.continue_training = True


@contextmanager
def unreadable_checkpoints_as_bad_arguments() -> Iterator[None]:
    """Let a checkpoint that is missing, damaged, or of other environments, end a command with its message."""
    try:
        yield
    except BadArgumentError:
        raise
    except (FileNotFoundError, ValueError) as error:
        raise BadArgumentError(str(error)) from error


@contextmanager
def _other_spaces_as_bad_argument(agent: str) -> Iterator[None]:
    """Let an agent of another environment end a command with a message that names its file."""
    try:
        yield
    except ValueError as error:
        if "spaces do not match" not in str(error):
            raise
        reason = " ".join(str(error).split())
        remedy = f"it acts in another environment ({reason}); give one that was trained with the same `--env` and wrappers"
        raise BadArgumentError(f"`trained_agent={agent!r}` is not valid: {remedy}") from error


def agent_with_statistics(experiment: ExperimentManager) -> str:
    """
    :param experiment: Experiment
    :return: File in whose folder the Zoo looks for the statistics of ``VecNormalize``: the agent that the training continues,
        also if the training is resumed later; otherwise one in the folder of the run, instead of the current folder
    """
    agent: str = getattr(experiment, "continued_agent", None) or experiment.trained_agent
    return agent or os.path.join(experiment.save_path, "")


def keep_monitor_files(experiment: ExperimentManager) -> None:
    """
    Let the environments of a run that is resumed append to their ``Monitor`` files. Those in other processes would empty them,
    and the checkpoint cannot restore these.

    :param experiment: Experiment before it creates environments
    """
    if RESUMED.get() is not None:
        experiment.monitor_kwargs = {**(experiment.monitor_kwargs or {}), "override_existing": False}


def create_callbacks(theirs: Callable[[], None], experiment: ExperimentManager) -> None:
    """Files are written atomically. With ``--save-freq``, also write checkpoints from which the training can be resumed."""
    create_zoo_callbacks(theirs, experiment)
    make_atomic(experiment.callbacks)
    if experiment.save_freq > 0 and not experiment.optimize_hyperparameters:
        folder = Path(experiment.save_path) / CHECKPOINTS
        experiment.callbacks.append(TrainingCheckpoint(experiment.save_freq, folder, verbose=experiment.verbose))


def load_pretrained_agent(
    theirs: Callable[..., object], experiment: ExperimentManager, hyperparams: dict[str, object], env: VecEnv
) -> object:
    """Resume a training if ``--trained-agent`` is a checkpoint of it."""
    if not is_checkpoint(experiment.trained_agent):
        with _other_spaces_as_bad_argument(experiment.trained_agent):
            return theirs(hyperparams, env)
    print(f"Resuming from {experiment.trained_agent}")
    given = {name: value for name, value in hyperparams.items() if name not in ("policy", "policy_kwargs")}
    algorithm = sys.modules["rl_zoo3.utils"].ALGOS[experiment.algo]
    same = {name: getattr(experiment, name) for name in ("device", "seed", "tensorboard_log", "verbose")}
    with unreadable_checkpoints_as_bad_arguments():
        return algorithm.resume(experiment.trained_agent, env, **same, **given)
