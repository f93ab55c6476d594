"""One run of RL Zoo by several processes of torchrun: rank 0 writes the folder of the run, and the others train with it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sb3_ppo_ext.common.validation import refuse
from sb3_ppo_ext.distributed.launch import Launch, find_launch
from sb3_ppo_ext.distributed.ranks import connect
from sb3_ppo_ext.zoo.entry_checks import check_readable
from sb3_ppo_ext.zoo.run_folder import CHECKPOINTS, MARKER, RESUMED

if TYPE_CHECKING:
    from rl_zoo3.exp_manager import ExperimentManager


def launch_of(experiment: ExperimentManager) -> Launch:
    """
    :param experiment: Experiment
    :return: Place of this process among those that train one model; a single one before :func:`share_run`
    """
    launch: Launch = getattr(experiment, "launch", Launch())
    return launch


def find_interrupted_run(experiment: ExperimentManager) -> None:
    """
    Go on in the folder of the run that was interrupted, if torchrun has started the processes again after one of them had
    died, and there is a checkpoint.

    :param experiment: Experiment before its setup
    """
    launch = find_launch("auto")
    if launch.size == 1 or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) == 0 or RESUMED.get() is not None:
        return
    if (folder := connect(launch).gather(_interrupted(Path(experiment.log_path)))[0]) is not None:
        RESUMED.set(folder)


def share_run(experiment: ExperimentManager, distributed: str) -> None:
    """
    Let all ranks use the folder of rank 0.

    :param experiment: Experiment that has read its hyperparameters
    :param distributed: Option ``distributed`` among them
    :raises ValueError: if hyperparameters are to be optimised
    """
    launch = find_launch(distributed)
    if launch.size == 1:
        return
    if experiment.optimize_hyperparameters:
        remedy = "torchrun trains one model; start several processes without it, with a `--storage` that they share"
        refuse("optimize_hyperparameters", True, remedy)
    ranks = connect(launch)
    experiment.launch = launch  # type: ignore[attr-defined]
    experiment.save_path = ranks.gather(experiment.save_path)[0]
    experiment.params_path = f"{experiment.save_path}/{experiment.env_name}"
    # They count the steps of all ranks.
    experiment.eval_freq, experiment.save_freq = (
        freq if freq <= 0 else max(freq // ranks.size, 1) for freq in (experiment.eval_freq, experiment.save_freq)
    )
    if not ranks.is_first:
        experiment.verbose = 0
        experiment.show_progress = False
        experiment.tensorboard_log = None


def _interrupted(log_path: Path) -> Path | None:
    """Folder of the run that the same call of torchrun has begun, if it has a checkpoint."""
    for path in log_path.glob(f"*/*/{MARKER}"):
        folder = path.parents[1]
        if json.loads(path.read_text()) == _identity() and any((folder / CHECKPOINTS).glob("*.zip")):
            return folder.resolve()
    return None


def _identity() -> dict[str, object]:
    # The agent of torchrun is the parent of the processes, and stays the same when it starts them again.
    return {"run": os.environ.get("TORCHELASTIC_RUN_ID"), "agent": os.getppid(), "host": socket.gethostname()}


def create_log_folder(theirs: Callable[[], None], experiment: ExperimentManager) -> None:
    """Create the folder of the run, on rank 0."""
    check_readable(getattr(experiment, "entry", {}))
    launch = launch_of(experiment)
    if launch.rank > 0:
        return
    theirs()
    if launch.size > 1 and RESUMED.get() is None:
        Path(experiment.params_path, MARKER).write_text(json.dumps(_identity()))


def create_zoo_callbacks(theirs: Callable[[], None], experiment: ExperimentManager) -> None:
    """Create the callbacks for evaluations and models, on rank 0."""
    if launch_of(experiment).rank == 0:
        theirs()
    elif experiment.save_freq > 0:
        experiment.save_freq = max(experiment.save_freq // experiment.n_envs, 1)  # as the Zoo does


def save_config(theirs: Callable[..., None], experiment: ExperimentManager, hyperparams: dict[str, object]) -> None:
    """Save how the run was started, on rank 0, unless it is resumed."""
    if launch_of(experiment).rank == 0 and RESUMED.get() is None:
        theirs(hyperparams)


def save_trained_model(theirs: Callable[..., None], experiment: ExperimentManager, model: object) -> None:
    """Save the model, on rank 0."""
    if launch_of(experiment).rank == 0:
        theirs(model)
