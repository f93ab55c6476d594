"""
Plot the log of a training: returns, KL divergence, clip fraction, entropy, advantages, learning rate, and more.

It reads ``progress.csv``, which RL Zoo writes for ``ppo_ext`` into the folder of the run, or the event files of TensorBoard.
On the command line: ``python -m sb3_ppo_ext.plot_run logs/ppo_ext/Pendulum-v1_1``
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Timesteps and values of each key, without the steps that have no value
Log: TypeAlias = dict[str, tuple[np.ndarray, np.ndarray]]
STEPS = "time/total_timesteps"
# Title, keys, and factor that the values are multiplied by
PANELS: tuple[tuple[str, tuple[str, ...], float], ...] = (
    ("return", ("rollout/ep_rew_mean", "eval/mean_reward"), 1.0),
    ("KL divergence", ("train/approx_kl", "train/kl"), 1.0),
    ("clip fraction", ("train/clip_fraction",), 1.0),
    ("entropy", ("train/entropy_loss",), -1.0),
    ("spread of the actions", ("train/std", "train/concentration"), 1.0),
    ("advantages", ("adv/raw_mean", "adv/raw_std", "adv/ema_mean", "adv/ema_std"), 1.0),
    ("learning rate", ("train/learning_rate", "train/critic_learning_rate"), 1.0),
    ("explained variance", ("train/explained_variance",), 1.0),
    ("value loss", ("train/value_loss",), 1.0),
    ("gradient norm", ("train/grad_norm", "train/critic_grad_norm"), 1.0),
)


def read_log(folder: str | Path) -> Log:
    """
    :param folder: Folder of a run, with a ``progress.csv`` or event files of TensorBoard
    :return: Timesteps and values of each key
    :raises ValueError: if there is neither, or both are empty
    """
    folder = Path(folder)
    if (folder / "progress.csv").is_file():
        log = _read_csv(folder / "progress.csv")
    elif next(folder.glob("events.out.tfevents.*"), None) is not None:
        log = _read_events(folder)
    else:
        raise ValueError(
            f"There is neither a `progress.csv` nor an event file of TensorBoard in {folder}: name the folder of a run, such "
            "as logs/ppo_ext/Pendulum-v1_1 of RL Zoo, or PPOExt_1 in the folder given as `tensorboard_log`"
        )
    if not any(key in log for _, keys, _ in PANELS for key in keys):
        raise ValueError(f"The log in {folder} is empty: the training ended before its first update")
    return log


def _read_csv(path: Path) -> Log:
    try:
        table = pd.read_csv(path)
    except pd.errors.EmptyDataError:
        return {}
    steps = table.pop(STEPS).to_numpy() if STEPS in table else np.arange(len(table))
    numbers = table.apply(pd.to_numeric, errors="coerce").items()
    return {str(key): (steps[values.notna()], values.dropna().to_numpy()) for key, values in numbers}


def _read_events(folder: Path) -> Log:
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={SCALARS: 0}).Reload()
    log = {}
    for key in events.Tags()[SCALARS]:
        scalars = events.Scalars(key)
        log[key] = (np.array([scalar.step for scalar in scalars]), np.array([scalar.value for scalar in scalars]))
    return log


def plot_runs(folders: Sequence[str | Path]) -> Figure:
    """
    :param folders: Folders of the runs, which are plotted in the same panels
    :return: Figure with a panel for each quantity that at least one run has logged
    :raises ValueError: see :func:`read_log`
    """
    logs = {Path(folder).name: read_log(folder) for folder in folders}
    if len(logs) < len(folders):
        logs = {str(folder): read_log(folder) for folder in folders}
    panels = [panel for panel in PANELS if any(key in log for key in panel[1] for log in logs.values())]
    n_columns = 3
    n_rows = -(-len(panels) // n_columns)
    figure = Figure(figsize=(4.2 * n_columns, 2.6 * n_rows), layout="constrained")
    axes = figure.subplots(n_rows, n_columns, squeeze=False).ravel()
    for ax, (title, keys, factor) in zip(axes, panels, strict=False):
        _plot_panel(ax, logs, keys, factor)
        ax.set_title(title, fontsize=10)
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    return figure


def _plot_panel(ax: Axes, logs: dict[str, Log], keys: Iterable[str], factor: float) -> None:
    shown = [key for key in keys if any(key in log for log in logs.values())]
    for color, (name, log) in enumerate(logs.items()):
        for key, style in zip(shown, ("-", "--", ":", "-."), strict=False):
            if key in log:
                steps, values = log[key]
                label = " ".join([*([name] if len(logs) > 1 else []), *([key.split("/")[1]] if len(shown) > 1 else [])])
                ax.plot(steps, factor * values, style, color=f"C{color}", label=label, linewidth=1.2)
    ax.set_xlabel("timesteps", fontsize=8)
    ax.tick_params(labelsize=8)
    if len(logs) > 1 or len(shown) > 1:
        ax.legend(fontsize=7)


def main() -> None:
    """Command line, see the documentation of the module."""
    parser = argparse.ArgumentParser(
        prog="python -m sb3_ppo_ext.plot_run", description="Plot the logs of one or more trainings."
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders with a progress.csv or event files of TensorBoard")
    parser.add_argument("-o", "--output", type=Path, help="file in any Matplotlib format (default: run.png in the first run)")
    arguments = parser.parse_args()
    try:
        figure = plot_runs(arguments.runs)
    except ValueError as error:
        parser.error(str(error))
    path = arguments.output or arguments.runs[0] / "run.png"
    formats = figure.canvas.get_supported_filetypes()
    if path.suffix[1:] not in formats:
        parser.error(f"--output {path}: Matplotlib writes {', '.join(sorted(formats))}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(path)


if __name__ == "__main__":
    main()
