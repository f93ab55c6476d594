"""The callback that writes checkpoints of a training run."""

from __future__ import annotations

import os
import pathlib
import warnings
from typing import ClassVar

from stable_baselines3.common.callbacks import BaseCallback

from sb3_ppo_ext.checkpoints.environments import FirstSteps
from sb3_ppo_ext.checkpoints.object_state import Changes, stateful_objects
from sb3_ppo_ext.checkpoints.training_state import TrainingState, file_of_rank, objects_of, write_checkpoint
from sb3_ppo_ext.common.validation import check_number, check_type, refuse
from sb3_ppo_ext.distributed.ranks import Ranks


class TrainingCheckpoint(BaseCallback):
    """
    Writes checkpoints from which :meth:`PPOExt.resume` continues the training, equal bit for bit to a run that was not
    interrupted. Each is one file, the zip of the model with the state of environments, callbacks, log files and generators. It
    is written as a whole or not at all, and ``PPOExt.load`` can read it as well.

    Checkpoints are written between two iterations, each of which is a rollout and an update. Whether the environments continue
    from a saved state as they did is checked with copies of them when the first checkpoint is written; if they do not, a
    warning says why, and the resumed training starts with a reset of the environments.

    In a distributed training, give it to all ranks. Each of them writes a file of its own, next to that of rank 0.

    :param save_freq: Number of steps of each environment after which a checkpoint is written, at the end of the iteration. At
        least 1
    :param save_path: Folder of the checkpoints; it is created with the first of them
    :param name_prefix: Beginning of the names of the files, which are ``{name_prefix}_{num_timesteps}_steps.zip``
    :param keep: Number of checkpoints to keep, at least 1; ``None`` for all. Older ones that this training has written are
        deleted
    :param verbose: Verbosity level: 0 for no output, 1 for the names of the files
    :raises ValueError: if an argument is not valid, or the model is not a ``PPOExt``
    """

    not_saved: ClassVar[set[str]] = {"_changes", "_all", "_first_steps", "_why_reset"}

    def __init__(
        self,
        save_freq: int,
        save_path: str | pathlib.Path,
        name_prefix: str = "training",
        keep: int | None = 2,
        verbose: int = 0,
    ):
        super().__init__(verbose)
        check_number("save_freq", save_freq, 1, integer=True)
        check_type("save_path", save_path, (str, pathlib.Path), "give the path of a folder")
        check_type("name_prefix", name_prefix, str, "give a string")
        if os.path.basename(name_prefix) != name_prefix:
            refuse("name_prefix", name_prefix, "give the beginning of a file name, and its folder as `save_path`")
        if keep is not None:
            check_number("keep", keep, 1, integer=True)
        self.save_freq, self.save_path, self.name_prefix, self.keep = save_freq, save_path, name_prefix, keep
        # Names of files of this training that have not been deleted, and the number of steps at the last of them
        self.written: list[str] = []
        self.last_step = 0
        self._changes: Changes | None = None
        self._first_steps: FirstSteps | None = None

    def _init_callback(self) -> None:
        if not hasattr(type(self.model), "resume"):
            refuse("callback", self, f"{type(self.model).__name__} cannot resume; use `PPOExt`, or SB3's `CheckpointCallback`")
        if pathlib.Path(self.save_path).is_file():
            refuse("save_path", self.save_path, "it is a file; give the path of a folder")

    def on_training_set_up(self, callback: BaseCallback) -> None:
        """
        Called by the model before an interrupted training is restored.

        :param callback: All callbacks of the training
        """
        self._changes = Changes(objects_of(self.model, callback), self._changes)

    def on_iterations_start(self, callback: BaseCallback) -> None:
        """
        Called by the model before the first iteration.

        :param callback: All callbacks of the training
        """
        self._all = callback
        self._first_steps = FirstSteps(self.model)
        self._why_reset: str | None = None

    def before_step(self) -> None:
        """Called by the model right before each step of the environments."""
        if self._first_steps is not None:
            self._first_steps.read_generators()

    def _on_rollout_start(self) -> None:
        self.before_step()

    def _on_step(self) -> bool:
        if self._first_steps is not None:
            self._first_steps.add(self.locals)
        return True

    def on_iteration_end(self, iteration: int) -> None:
        """
        Called by the model after each update.

        :param iteration: Number of iterations since the start of the training
        """
        if self.n_calls - self.last_step < self.save_freq:
            return
        self.last_step = self.n_calls
        assert self._changes is not None
        self._check_environments()
        folder, ranks = pathlib.Path(self.save_path), self._ranks()
        new = file_of_rank(f"{self.name_prefix}_{self.num_timesteps}_steps.zip", ranks.index)
        self.written = [*(name for name in self.written if name != new), new]
        obsolete = [] if self.keep is None else self.written[: -self.keep]
        self.written = self.written[len(obsolete) :]
        state = TrainingState.of(self.model, self._all, iteration, self._changes.select, self._why_reset)
        # The file of rank 0 is the last to be written, so that those of all ranks exist if it does.
        if ranks.is_first:
            ranks.gather(None)
        write_checkpoint(folder / new, self.model, state)
        if not ranks.is_first:
            ranks.gather(None)
        ranks.gather(None)
        for name in obsolete:
            (folder / name).unlink(missing_ok=True)
        if self.verbose >= 1:
            print(f"Checkpoint: {folder / new}")

    def _ranks(self) -> Ranks:
        ranks: Ranks = self.model.ranks  # type: ignore[attr-defined]
        return ranks

    def _check_environments(self) -> None:
        if self._first_steps is None or not self._first_steps.can_be_checked:
            return
        self._why_reset, self._first_steps = self._first_steps.reason_not_to_restore(), None
        if self._why_reset is not None:
            warnings.warn(
                f"A resumed training will start with a reset of the environments, since {self._why_reset}.", stacklevel=3
            )
        self._warn_of_other_processes()

    def _warn_of_other_processes(self) -> None:
        for each in stateful_objects(self._all):
            if "processes" in vars(each) and self._why_reset is None:
                warnings.warn(
                    f"The environments of a callback's {type(each).__name__} are in other processes: a resumed training "
                    "starts them anew, with other results than without the interruption.",
                    stacklevel=4,
                )


def training_checkpoints(callback: BaseCallback) -> list[TrainingCheckpoint]:
    """
    :param callback: All callbacks of a training run
    :return: Those among them that write checkpoints
    """
    found: list[TrainingCheckpoint] = [each for each in stateful_objects(callback) if isinstance(each, TrainingCheckpoint)]
    return found
