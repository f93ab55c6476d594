"""Callback that writes the log of a training to ``progress.csv``, for ``plot_run``."""

from pathlib import Path

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import CSVOutputFormat


class ProgressFile(BaseCallback):
    """
    Writes the logged numbers to ``progress.csv``, in addition to the other outputs of the logger. A run that continues
    (``reset_num_timesteps=False``) appends to the existing file, a new one replaces it.

    :param folder: Folder of the file, created if it does not exist
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
        # RL Zoo also calls this if a training run has failed before it began, and otherwise once more than SB3.
        if self.writer is not None:
            self.logger.output_formats.remove(self.writer)
            self.writer.close()
            self.writer = None


class _Numbers(CSVOutputFormat):
    """SB3's CSV output for numbers only, where SB3's would raise for a logged video or figure; it can append to a file."""

    def __init__(self, path: Path):
        path.touch()
        self.file = path.open("r+")
        header = self.file.readline().rstrip("\n")
        self.file.seek(0, 2)
        self.keys = header.split(",") if header else []
        self.separator, self.quotechar = ",", '"'

    def write(self, key_values: dict[str, object], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        numbers = {key: value for key, value in key_values.items() if isinstance(value, int | float | np.number)}
        super().write(numbers, key_excluded, step)
