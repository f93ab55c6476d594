"""
Plot the logs of training runs: returns, KL divergence, clip fraction, entropy, advantages, learning rate, and more.

It reads ``progress.csv``, which RL Zoo writes for ``ppo_ext`` into the folder of the run, the event files of TensorBoard, and
the ``monitor.csv`` files and evaluations that the Zoo writes for every algorithm.
On the command line: ``python -m sb3_ppo_ext.plot_run logs/ppo_ext/Pendulum-v1_1``
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

try:
    import matplotlib as mpl
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import EngFormatter
except ImportError as error:
    if __name__ != "__main__":
        raise ImportError(f"{error}: `pip install 'sb3-ppo-ext[plot]'` has what plots need") from error
    missing: str | None = f"{error}: `pip install 'sb3-ppo-ext[plot]'` has what plots need"
else:
    missing = None

# Timesteps and values of each key, without the steps that have no value
Log: TypeAlias = dict[str, tuple[np.ndarray, np.ndarray]]
STEPS = "time/total_timesteps"
PATTERNS = ("progress.csv", "events.out.tfevents.*", "*monitor.csv")
LINES: tuple[Any, ...] = ("-", "--", ":", "-.")
# Number of episodes over which SB3 averages the returns that it logs
WINDOW = 100
# What all plots of this project have in common
STYLE: Any = {
    "font.size": 10,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "savefig.dpi": 200,
    # The same figure makes the same file, whose text can be read and searched.
    "svg.hashsalt": "sb3_ppo_ext",
    "svg.fonttype": "none",
}
# What a legend says of curves with bands
BAND = "lines: means where there are several seeds; bands: from the smallest to the largest value"
# The colour of an algorithm in all plots; others have those of Matplotlib's cycle from the second one on
COLORS = {"ppo": "0.45", "PPO": "0.45", "SB3": "0.45", "ppo_ext": "C0", "PPOExt": "C0", "native": "C0"}


class Panel(NamedTuple):
    """A part of the figure: keys of the log, the factor that their values are multiplied by, and the label of the axis."""

    title: str
    keys: tuple[str, ...]
    factor: float
    label: str


PANELS = (
    Panel("return", ("rollout/ep_rew_mean", "eval/mean_reward"), 1.0, "return of an episode"),
    Panel("KL divergence", ("train/approx_kl", "train/kl"), 1.0, "KL divergence, nats"),
    Panel("clip fraction", ("train/clip_fraction",), 1.0, "fraction of samples"),
    Panel("entropy", ("train/entropy_loss",), -1.0, "entropy, nats"),
    Panel("spread of the actions", ("train/std", "train/concentration"), 1.0, "units of the action"),
    Panel("advantages", ("adv/raw_mean", "adv/raw_std", "adv/ema_mean", "adv/ema_std"), 1.0, "units of the return"),
    Panel("learning rate", ("train/learning_rate", "train/critic_learning_rate"), 1.0, "learning rate"),
    Panel("explained variance", ("train/explained_variance",), 1.0, "fraction of the variance"),
    Panel("value loss", ("train/value_loss",), 1.0, "squared error"),
    Panel("gradient norm", ("train/grad_norm", "train/critic_grad_norm"), 1.0, "norm"),
)


def find_runs(folders: str | Path | Iterable[str | Path]) -> list[Path]:
    """
    :param folders: Folders of runs, or folders that contain them at any depth, such as ``logs``; or one such folder
    :return: Folders of the runs, in the order of the arguments and, within one, of their names
    :raises ValueError: if there is no log in one of them
    """
    runs: list[Path] = []
    for folder in _paths(folders):
        found = sorted({path.parent for pattern in PATTERNS for path in folder.rglob(pattern)})
        if not found:
            raise ValueError(_nothing_in(folder))
        # A folder in that of a run has another log of the same run.
        runs += [path for path in found if path not in runs and not set(path.parents) & set(found)]
    return runs


def _paths(folders: str | Path | Iterable[str | Path]) -> list[Path]:
    return [Path(folders)] if isinstance(folders, str | Path) else [Path(folder) for folder in folders]


def _nothing_in(folder: Path) -> str:
    return (
        f"There is no `progress.csv`, no event file of TensorBoard and no `monitor.csv` in {folder}: name the folder of a "
        "run, such as logs/ppo_ext/Pendulum-v1_1 of RL Zoo, or PPOExt_1 in the folder given as `tensorboard_log`"
    )


def read_log(folder: str | Path) -> Log:
    """
    :param folder: Folder of a run, with a ``progress.csv``, event files of TensorBoard, or ``monitor.csv`` files. The first of
        these that is there counts. The evaluations of ``EvalCallback`` (``evaluations.npz``) are added if they are not logged
    :return: Timesteps and values of each key
    :raises ValueError: if there is none of them, or they are empty or damaged
    """
    folder = Path(folder)
    if not any(next(folder.glob(pattern), None) for pattern in PATTERNS):
        raise ValueError(_nothing_in(folder))
    try:
        log = {**_read_evaluations(folder), **_read_training(folder)}
    except ImportError:
        raise
    except Exception as error:  # pandas, NumPy and TensorBoard have errors of their own for damaged files.
        raise ValueError(
            f"The log in {folder} cannot be read, perhaps it is damaged ({type(error).__name__}: {error})"
        ) from error
    if not any(key in log for panel in PANELS for key in panel.keys):
        raise ValueError(f"The log in {folder} is empty: the training ended before its first update")
    return log


def _read_training(folder: Path) -> Log:
    if (folder / "progress.csv").is_file():
        return _read_csv(folder / "progress.csv")
    if next(folder.glob("events.out.tfevents.*"), None) is not None:
        return _read_events(folder)
    return _read_monitors(folder)


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


def _read_monitors(folder: Path) -> Log:
    from stable_baselines3.common.monitor import load_results

    episodes = load_results(str(folder))
    returns = episodes["r"].rolling(WINDOW, min_periods=1).mean()
    return {"rollout/ep_rew_mean": (episodes["l"].cumsum().to_numpy(), returns.to_numpy())} if len(episodes) else {}


def _read_evaluations(folder: Path) -> Log:
    path = folder / "evaluations.npz"
    if not path.is_file():
        return {}
    with np.load(path) as evaluations:
        return {"eval/mean_reward": (evaluations["timesteps"], evaluations["results"].mean(axis=1))}


def plot_runs(folders: str | Path | Iterable[str | Path]) -> Figure:
    """
    Plot one run or compare several in the same panels. If the runs lie in folders of several algorithms, as ``logs/ppo`` and
    ``logs/ppo_ext`` of RL Zoo, each algorithm has a colour; otherwise each run has one. ::

        from sb3_ppo_ext.plot_run import plot_runs

        plot_runs(["logs/ppo/Pendulum-v1_1", "logs/ppo_ext/Pendulum-v1_1"]).savefig("comparison.svg")

    :param folders: Folders of the runs, or folders that contain them at any depth, of which runs without an update are left
        out; or one such folder
    :return: Figure with a panel for each quantity that at least one run has logged
    :raises ValueError: see :func:`find_runs` and :func:`read_log`
    """
    folders = _paths(folders)
    found = {run: _read_unless_empty(run, is_named=run in folders) for run in find_runs(folders)}
    runs = [run for run, log in found.items() if log]
    if not runs:
        raise ValueError(f"The logs in {', '.join(map(str, folders))} are empty: no training got to its first update")
    logs, groups = [found[run] for run in runs], _groups(runs)
    first = int(bool(COLORS.keys() & set(groups)))
    colors = {group: COLORS.get(group, f"C{number}") for number, group in enumerate(dict.fromkeys(groups), first)}
    panels = [panel for panel in PANELS if any(key in log for key in panel.keys for log in logs)]
    n_columns = min(len(panels), 3)
    n_rows = -(-len(panels) // n_columns)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(3.6 * n_columns, 2.6 * n_rows), layout="constrained")
        axes = figure.subplots(n_rows, n_columns, squeeze=False).ravel()
        for ax, panel in zip(axes, panels, strict=False):
            _plot_panel(ax, panel, [(colors[group], log) for group, log in zip(groups, logs, strict=True)])
        for ax in axes[len(panels) :]:
            ax.set_axis_off()
        if len(runs) > 1:
            handles = [Line2D([], [], color=color, label=group) for group, color in colors.items()]
            figure.legend(handles=handles, loc="outside lower center", ncols=min(len(colors), 3))
    return figure


def _read_unless_empty(run: Path, is_named: bool) -> Log:
    """The log of a run; of one that was only found, and has no log yet, nothing."""
    try:
        return read_log(run)
    except ValueError:
        if is_named:
            raise
        return {}


def _names(runs: Sequence[Path]) -> list[str]:
    """The names of the runs, with as much of their paths as tells them apart."""
    if len({run.name for run in runs}) == len(runs):
        return [run.name for run in runs]
    shared = os.path.commonpath([run.absolute() for run in runs])
    return [str(run.absolute().relative_to(shared)) for run in runs]


def _groups(runs: Sequence[Path]) -> list[str]:
    """What gives each run its colour: its algorithm, if the runs lie in a folder for each algorithm, or else its own name."""
    parents = [run.absolute().parent for run in runs]
    has_algorithms = len(set(parents)) > 1 and len({parent.parent for parent in parents}) == 1
    return [parent.name for parent in parents] if has_algorithms else _names(runs)


def _plot_panel(ax: Axes, panel: Panel, logs: Sequence[tuple[str, Log]]) -> None:
    shown = [key for key in panel.keys if any(key in log for _, log in logs)]
    for color, log in logs:
        for key, style in zip(shown, LINES, strict=False):
            if key in log:
                steps, values = log[key]
                ax.plot(steps, panel.factor * values, style, color=color, linewidth=1.2)
    ax.set(title=panel.title, xlabel="timesteps", ylabel=panel.label)
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    if len(shown) > 1:
        styles = zip(shown, LINES, strict=False)
        handles = [Line2D([], [], color="0.3", linestyle=style, label=key.split("/")[1]) for key, style in styles]
        ax.legend(handles=handles, fontsize=8)


def free_path(path: Path) -> Path:
    """
    :param path: Path of a file to write
    :return: The path if there is no such file, or else the first of ``run_2.png``, ``run_3.png``, ... that is free
    """
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_stem(f"{path.stem}_{number}")
    return free


def main() -> None:
    """Command line, see the documentation of the module."""
    parser = argparse.ArgumentParser(
        prog="python -m sb3_ppo_ext.plot_run", description="Plot the logs of one or more training runs."
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, or folders that contain them, such as logs")
    kept = "a file that exists is kept, and the next free name taken"
    parser.add_argument(
        "-o", "--output", type=Path, help=f"file in any Matplotlib format (default: run.png in the first folder); {kept}"
    )
    arguments = parser.parse_args()
    if missing is not None:
        parser.error(missing)
    try:
        figure = plot_runs(arguments.runs)
    except ValueError as error:
        parser.error(str(error))
    path = arguments.output or arguments.runs[0] / "run.png"
    formats = figure.canvas.get_supported_filetypes()
    if path.suffix[1:] not in formats:
        parser.error(f"--output {path}: Matplotlib writes {', '.join(sorted(formats))}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output {path}: its folder cannot be made ({error})")
    path = free_path(path)
    with mpl.rc_context(STYLE):
        figure.savefig(path)
    print(path)


if __name__ == "__main__":
    main()
