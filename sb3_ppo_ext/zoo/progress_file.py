"""Keeps what a training logs in ``progress.csv``, for ``plot_run``."""

from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import CSVOutputFormat


class ProgressFile(BaseCallback):
    """
    Writes the numbers that are logged to ``progress.csv`` as well, whatever else the logger writes to. A training that goes on
    (``reset_num_timesteps=False``) adds to the file that is there; one that begins replaces it.

    :param folder: Folder of the file, made if it is not there
    """

    def __init__(self, folder: str | Path):
        super().__init__()
        self.path = Path(folder) / "progress.csv"
        self.writer: _Numbers | None = None

    def _on_training_start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.num_timesteps == 0:
            self.path.unlink(missing_ok=True)
        self.writer = _Numbers(self.path)
        self.logger.output_formats.append(self.writer)

    def _on_step(self) -> bool:
        return True

    def _on_training_end(self) -> None:
        # RL Zoo calls this when a training has failed before it began, and once more than SB3 otherwise.
        if self.writer is not None:
            self.logger.output_formats.remove(self.writer)
            self.writer.close()
            self.writer = None


class _Numbers(CSVOutputFormat):
    """SB3's, which would raise for a video or figure that a user logs for TensorBoard, and which always begins a new file."""

    def __init__(self, path: Path):
        path.touch()
        self.file = path.open("r+")
        header = self.file.readline().rstrip("\n")
        self.file.seek(0, 2)
        self.keys = header.split(",") if header else []
        self.separator, self.quotechar = ",", '"'

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        numbers = {key: value for key, value in key_values.items() if isinstance(value, int | float | np.number)}
        super().write(numbers, key_excluded, step)
