"""Callbacks."""

from pathlib import Path

from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import CSVOutputFormat


class ProgressFile(BaseCallback):
    """
    Writes what is logged to ``progress.csv`` as well, whatever else the logger writes to.

    :param folder: For the file; made if it is not there
    """

    def __init__(self, folder: str | Path):
        super().__init__()
        self.path = Path(folder) / "progress.csv"

    def _on_training_start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.logger.output_formats.append(CSVOutputFormat(str(self.path)))

    def _on_step(self) -> bool:
        return True
