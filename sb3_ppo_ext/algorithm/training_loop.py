"""The loop of a training run, which an interrupted one enters where it was interrupted."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch as th
from stable_baselines3.common.base_class import maybe_make_env
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import configure
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback

from sb3_ppo_ext.algorithm.distributed_training import callbacks_of_rank, training_of
from sb3_ppo_ext.algorithm.saved_state import SavedState
from sb3_ppo_ext.checkpoints.training_checkpoint import TrainingCheckpoint, training_checkpoints
from sb3_ppo_ext.checkpoints.training_state import CheckpointPath, TrainingState, check_ranks, read_checkpoint_of_rank
from sb3_ppo_ext.common.guards import normalizers_of
from sb3_ppo_ext.common.schedules import is_constant
from sb3_ppo_ext.common.type_aliases import Kwargs
from sb3_ppo_ext.common.validation import check_number, check_type, refuse
from sb3_ppo_ext.distributed.launch import find_launch
from sb3_ppo_ext.distributed.ranks import connect
from sb3_ppo_ext.distributed.statistics import share_statistics, unshare_statistics
from sb3_ppo_ext.rollout.advice import say_once
from sb3_ppo_ext.rollout.lazy_locals import LazyLocals

SelfTrainingLoop = TypeVar("SelfTrainingLoop", bound="TrainingLoop")


def check_learn(total_timesteps: float, callback: object, log_interval: int | None) -> None:
    """
    Check arguments of ``learn``.

    :param total_timesteps: Number of steps, also a float
    :param callback: Callback, list of callbacks, function, or ``None``
    :param log_interval: Number of iterations between two dumps of the log; ``None`` for no dump
    :raises ValueError: if one of them is not valid
    """
    check_number("total_timesteps", total_timesteps, 0, infinite=True)
    if log_interval is not None:
        check_number("log_interval", log_interval, 1, integer=True)
    is_list = isinstance(callback, list) and all(isinstance(each, BaseCallback) for each in callback)
    if not (callback is None or is_list or callable(callback) or isinstance(callback, BaseCallback)):
        refuse(
            "callback", callback, "give a `BaseCallback`, a list of these, a function of `locals()` and `globals()`, or None"
        )


class TrainingLoop(SavedState):
    """An on-policy algorithm whose training can be interrupted and resumed."""

    # State that the next call of `learn` continues from
    _interrupted: TrainingState | None = None

    @classmethod
    def resume(
        cls: type[SelfTrainingLoop],
        path: CheckpointPath,
        env: GymEnv | str,
        device: th.device | str = "auto",
        custom_objects: Kwargs | None = None,
        print_system_info: bool = False,
        **kwargs: Any,
    ) -> SelfTrainingLoop:
        """
        Load a model from a checkpoint of :class:`~sb3_ppo_ext.TrainingCheckpoint`, so that its training can continue: the next
        call of ``learn``, with the same arguments as the interrupted one, continues to its ``total_timesteps`` and gives the
        same model, bit for bit, as without the interruption. Environments and callbacks are created as before; that call
        gives them the state that they had at the checkpoint, and log files continue after it.

        In a distributed training, call it on all ranks: rank 0 chooses the checkpoint, and each rank reads its own file of it.

        The file is unpickled: only resume from files that you trust.

        :param path: Checkpoint, or a folder, of which the newest whole checkpoint is taken
        :param env: Environments of the same kind and number as in the interrupted training, or an id
        :param device: Device on which the code should run
        :param custom_objects: Dictionary of objects to replace upon loading, see ``load``
        :param print_system_info: Whether to print system info from the saved model and the current system info
        :param kwargs: options to change when loading; with any change the results are others than without the interruption
        :return: Model whose next call of ``learn`` continues with the training
        :raises FileNotFoundError: if there is no checkpoint
        :raises ValueError: if the file is damaged, or is not a checkpoint, or the number of environments is another one
        """
        check_type("path", path, (str, os.PathLike), "give the path of a checkpoint, or of the folder with them")
        if not kwargs.get("trusted", True):
            refuse("trusted", False, "the state of a training run is a pickle; read the model with `load(..., trusted=False)`")
        if "force_reset" in kwargs:
            refuse(
                "force_reset", kwargs["force_reset"], "environments are reset if their state cannot be restored; leave it out"
            )
        ranks = connect(find_launch(kwargs.get("distributed", "auto")))
        path, state = read_checkpoint_of_rank(path, ranks)
        check_ranks(path, ranks)
        env = cls._wrap_env(maybe_make_env(env, verbose=0))
        state.check_environments(env)
        model = cls.load(path, env, device, custom_objects, print_system_info, force_reset=False, **kwargs)
        model._interrupted = state
        return model

    def learn(
        self: SelfTrainingLoop,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 1,
        tb_log_name: str = "PPOExt",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> SelfTrainingLoop:
        check_learn(total_timesteps, callback, log_interval)
        if not reset_num_timesteps:
            self._warn_of_ended_schedules()
        with training_of(self, total_timesteps=total_timesteps, reset_num_timesteps=reset_num_timesteps):
            iteration = 0
            total_timesteps, callback = self._setup_learn(
                total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar
            )
            callback.on_training_start(LazyLocals(locals()), globals())
            assert self.env is not None
            checkpoints = training_checkpoints(callback)
            iteration = self._start_iterations(callback, checkpoints)

            with self._engine_is_chosen(callback):
                while self.num_timesteps < total_timesteps:
                    self._share_normalizer()  # A policy that was put in the place of the model's may have others.
                    if not self.collect_rollouts(self.env, callback, self.rollout_buffer, n_rollout_steps=self.n_steps):
                        break
                    iteration += 1
                    self._update_current_progress_remaining(self.num_timesteps, total_timesteps)
                    if log_interval is not None and iteration % log_interval == 0:
                        self.dump_logs(iteration)
                    self.train()
                    if self.normalizer is not None:
                        self.normalizer.end_rollout()
                    for checkpoint in checkpoints:
                        checkpoint.on_iteration_end(iteration)

            callback.on_training_end()
            self._before_step = ()
        return self

    def _update_current_progress_remaining(self, num_timesteps: int, total_timesteps: int) -> None:
        # The last rollout may end after `total_timesteps`. A negative progress would make most schedules negative: a negative
        # learning rate undoes what was learned.
        super()._update_current_progress_remaining(num_timesteps, total_timesteps)
        self._current_progress_remaining = max(self._current_progress_remaining, 0.0)

    def _warn_of_ended_schedules(self) -> None:
        """Warn once if a training goes on whose schedules have come to their end: they begin anew, and end again."""
        has_ended = self.num_timesteps > 0 and self._current_progress_remaining <= 0 and self._interrupted is None
        values = {name: getattr(self, name) for name in ("learning_rate", "clip_range", "clip_range_vf", "ent_coef")}
        decaying = [name for name, value in values.items() if value is not None and not is_constant(value)]
        decaying += ["lr_decay"] if self.lr_decay != "constant" else []
        if has_ended and decaying:
            say_once(
                self,
                f"`learn(reset_num_timesteps=False)` goes on with a training whose schedules ({', '.join(decaying)}) have "
                "come to their end. As in SB3, they jump back, and reach their end again at the end of this call: train in "
                "one call, with constants, or continue an interrupted training with `PPOExt.resume`.",
            )

    def _init_callback(self, callback: MaybeCallback, progress_bar: bool = False) -> BaseCallback:
        if not self.ranks.is_first:
            callback, progress_bar = callbacks_of_rank(callback, self.ranks), False
        return super()._init_callback(callback, progress_bar)

    def _setup_learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        reset_num_timesteps: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[int, BaseCallback]:
        if self._interrupted is None:
            return super()._setup_learn(total_timesteps, callback, reset_num_timesteps, *args, **kwargs)
        remaining = self._interrupted.remaining_timesteps(total_timesteps, reset_num_timesteps)
        with self._same_log_folder(self._interrupted.logs["folder"]):
            return super()._setup_learn(remaining, callback, False, *args, **kwargs)

    @contextmanager
    def _same_log_folder(self, folder: str | None) -> Iterator[None]:
        """Log to the folder of the interrupted training instead of a new one, unless the user has set a logger."""
        is_new = not self._custom_logger
        if is_new and folder is not None and self.tensorboard_log is not None and _is_in(folder, self.tensorboard_log):
            self.set_logger(configure(folder, ["stdout", "tensorboard"] if self.verbose >= 1 else ["tensorboard"]))
        try:
            yield
        finally:
            self._custom_logger = not is_new

    def _start_iterations(self, callback: BaseCallback, checkpoints: list[TrainingCheckpoint]) -> int:
        """Restore an interrupted training, if there is one, and return the number of its iterations."""
        for checkpoint in checkpoints:
            checkpoint.on_training_set_up(callback)
        state, self._interrupted = self._interrupted, None
        unshare_statistics(normalizers_of(self))  # An environment may be reset on some of the ranks only.
        iteration = 0 if state is None else state.restore(self, callback)
        if self.ranks.are_several:
            share_statistics(normalizers_of(self), self.ranks)
        for checkpoint in checkpoints:
            checkpoint.on_iterations_start(callback)
        self._before_step = [checkpoint.before_step for checkpoint in checkpoints]
        return iteration


def _is_in(folder: str, root: str) -> bool:
    """Whether a folder is below another one, as that of a ``tb_log_name`` with slashes."""
    root = os.path.realpath(root)
    try:
        return os.path.commonpath([root, os.path.realpath(folder)]) == root
    except ValueError:  # on other drives of Windows
        return False
