"""Log files of a training run that continues: without a gap, and without the rows after the checkpoint."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

from stable_baselines3.common.logger import CSVOutputFormat, Logger, TensorBoardOutputFormat
from stable_baselines3.common.monitor import ResultsWriter

from sb3_ppo_ext.checkpoints.object_state import attributes_of
from sb3_ppo_ext.common.type_aliases import StateDict


class LogFiles:
    """
    The text files of a logger and of ``Monitor`` wrappers, and the files of TensorBoard.

    :param logger: Logger of the model
    :param targets: Environments and wrappers
    """

    def __init__(self, logger: Logger, targets: list[Any]):
        self.logger = logger
        values = [value for each in targets for value in attributes_of(each).values()]
        self.writers = [value for value in values if isinstance(value, ResultsWriter)]

    def read(self) -> StateDict:
        """:return: Contents of the text files, columns of CSV files, and values that wait for the next row"""
        return {
            "folder": self.logger.get_dir(),
            "waiting": {name: dict(getattr(self.logger, name)) for name in _WAITING},
            "contents": {name: _content(file) for name, file in self._files().items()},
            "columns": [list(output.keys) for output in self._csv_files()],
        }

    def write(self, saved: StateDict, num_timesteps: int) -> None:
        """
        :param saved: What :meth:`read` returned
        :param num_timesteps: Number of time steps at the checkpoint; TensorBoard does not show what was logged later
        """
        for name in _WAITING:
            getattr(self.logger, name).update(saved["waiting"][name])
        for key, file in self._files().items():
            if key in saved["contents"]:
                _replace_content(file, saved["contents"][key])
        for csv_file, columns in zip(self._csv_files(), saved["columns"], strict=False):
            csv_file.keys = columns
        for output in self.logger.output_formats:
            if isinstance(output, TensorBoardOutputFormat):
                _hide_later_events(output, num_timesteps)

    def _files(self) -> dict[tuple[str, str, int], object]:
        """Open text files by the class that writes them, their name without the folder, and a number."""
        owners = [*self.logger.output_formats, *self.writers]
        files = [(owner, getattr(owner, "file", None) or getattr(owner, "file_handler", None)) for owner in owners]
        named: dict[tuple[str, str, int], object] = {}
        for owner, file in files:
            path = getattr(file, "name", None)
            if isinstance(path, str) and os.path.isfile(path):
                kind, name = type(owner).__name__, os.path.basename(path)
                named[kind, name, sum(key[:2] == (kind, name) for key in named)] = file
        return named

    def _csv_files(self) -> Iterator[CSVOutputFormat]:
        yield from (output for output in self.logger.output_formats if isinstance(output, CSVOutputFormat))


# Attributes of a logger with values that have been recorded since the last row
_WAITING = ("name_to_value", "name_to_count", "name_to_excluded")


def _content(file: Any) -> str:
    with contextlib.suppress(AttributeError, ValueError):  # closed
        file.flush()
    with open(file.name, newline="") as same:
        return same.read()


def _replace_content(file: Any, content: str) -> None:
    file.seek(0)
    file.truncate()
    file.write(content)
    file.flush()


def _hide_later_events(output: TensorBoardOutputFormat, num_timesteps: int) -> None:
    from torch.utils.tensorboard.writer import SummaryWriter

    folder = output.writer.log_dir
    output.writer.close()
    # TensorBoard reads files in the order of their names. They begin with the second in which the file was opened, and end
    # with a number that counts the files of the process: as text, 10 comes before 9.
    time.sleep(1.001 - time.time() % 1)
    output.writer = SummaryWriter(log_dir=folder, purge_step=num_timesteps + 1)
