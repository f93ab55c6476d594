"""The callback that writes checkpoints of a training."""

from __future__ import annotations

import copy
import pathlib
import warnings
from typing import Any, ClassVar

from stable_baselines3.common.callbacks import BaseCallback

from sb3_ppo_ext.checkpoints.environments import MAX_CHECKED, Step, reason_not_to_restore, state_of
from sb3_ppo_ext.checkpoints.object_state import Changes, ObjectState, stateful_objects
from sb3_ppo_ext.checkpoints.training_state import TrainingState, further_objects, write_checkpoint
from sb3_ppo_ext.common.validation import check_number, check_type, refuse


class TrainingCheckpoint(BaseCallback):
    """
    Writes checkpoints from which :meth:`PPOExt.resume` goes on with the training, equal to the bit to a training that was not
    interrupted. Each is one file, the zip of the model with the state of environments, callbacks, log files and generators. It
    is written as a whole or not at all, and ``PPOExt.load`` can read it as well.

    Checkpoints are written between two iterations, each of which is a rollout and an update. Whether the environments go on
    from a saved state as they did is checked with copies of them when the first checkpoint is written; if they do not, a
    warning says why, and the resumed training starts with a reset of the environments.

    :param save_freq: Number of steps of each environment after which a checkpoint is written, at the end of the iteration. At
        least 1
    :param save_path: Folder of the checkpoints; it is created with the first of them
    :param name_prefix: Beginning of the names of the files, which are ``{name_prefix}_{num_timesteps}_steps.zip``
    :param keep: Number of checkpoints to keep, at least 1; ``None`` for all. Older ones that this training has written are
        deleted
    :param verbose: Verbosity level: 0 for no output, 1 for the names of the files
    :raises ValueError: if an argument is not valid, or the model is not a ``PPOExt``
    """

    not_saved: ClassVar[set[str]] = {"_changes", "_all", "_first_state", "_first_steps", "_why_reset"}

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
        if keep is not None:
            check_number("keep", keep, 1, integer=True)
        self.save_freq, self.save_path, self.name_prefix, self.keep = save_freq, save_path, name_prefix, keep
        # Files of this training that have not been deleted, and the number of steps at the last of them
        self.written: list[str] = []
        self.last_step = 0

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
        self._changes = Changes(ObjectState(further_objects(self.model, callback), self.model))
        self.last_step = self.n_calls

    def on_iterations_start(self, callback: BaseCallback) -> None:
        """
        Called by the model before the first iteration.

        :param callback: All callbacks of the training
        """
        self._all = callback
        self._first_state: bytes | None = state_of(self.training_env)
        self._first_steps: list[Step] = []
        self._why_reset: str | None = None

    def _on_step(self) -> bool:
        if self._first_state is not None and len(self._first_steps) * self.training_env.num_envs < MAX_CHECKED:
            outcome = tuple(self.locals[name] for name in ("new_obs", "rewards", "dones"))
            # Not `clipped_actions`, which an environment may have changed in place
            actions = self.model._actions_for_env(self.locals["samples"])  # type: ignore[attr-defined]
            self._first_steps.append(copy.deepcopy(Step(actions, outcome)))
        return True

    def on_iteration_end(self, iteration: int) -> None:
        """
        Called by the model after each update.

        :param iteration: Number of iterations since the start of the training
        """
        if self.n_calls - self.last_step < self.save_freq:
            return
        self.last_step = self.n_calls
        if self._first_state is not None:
            self._check_environments(self._first_state)
        path = pathlib.Path(self.save_path) / f"{self.name_prefix}_{self.num_timesteps}_steps.zip"
        self.written = [*(name for name in self.written if name != str(path)), str(path)]
        obsolete = [] if self.keep is None else self.written[: -self.keep]
        self.written = self.written[len(obsolete) :]
        write_checkpoint(path, self.model, TrainingState.of(self.model, self._all, iteration, self._changes, self._why_reset))
        for name in obsolete:
            pathlib.Path(name).unlink(missing_ok=True)
        if self.verbose >= 1:
            print(f"Checkpoint: {path}")

    def _check_environments(self, first_state: bytes) -> None:
        self._why_reset = reason_not_to_restore(self.training_env, first_state, self._first_steps)
        self._first_state, self._first_steps = None, []
        if self._why_reset is not None:
            warnings.warn(
                f"A resumed training will start with a reset of the environments, since {self._why_reset}.", stacklevel=2
            )


def training_checkpoints(callback: BaseCallback) -> list[TrainingCheckpoint]:
    """
    :param callback: All callbacks of a training
    :return: Those among them that write checkpoints
    """
    found: list[Any] = [each for each in stateful_objects(callback) if isinstance(each, TrainingCheckpoint)]
    return found
