"""
Shared code of the studies: a grid of runs in several processes, tables, plots, and small environments that step as one batch.

Not a script.
"""

import argparse
import csv
import gzip
import io
import multiprocessing
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.plot_run import BAND, STYLE

mpl.use("agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Row = dict[str, Any]
plt.rcParams.update(STYLE)
# Largest number of points of a curve in a plot; more would make large files in which nothing more is seen.
MAX_POINTS = 80


# Grids


@dataclass(frozen=True)
class Job:
    """One run: the settings that distinguish it from the others (columns of the table), its seed, and its timesteps."""

    settings: dict[str, Any]
    seed: int
    timesteps: int


def parser_of(
    description: str | None, timesteps: int | None, seeds: int = 5, **choices: Sequence[str]
) -> argparse.ArgumentParser:
    """
    :param description: Description of the study
    :param timesteps: Number of timesteps of each run; ``None`` if the study defines it and the option is only an upper limit
    :param seeds: Default number of runs of each kind
    :param choices: Further options by name, each with the values to choose from
    :return: Parser of the arguments of a study
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=seeds, help="number of runs of each kind (default: %(default)s)")
    length = "of each run (default: %(default)s)" if timesteps else "of each run at most (default: no limit)"
    parser.add_argument("--timesteps", type=int, default=timesteps, help=length)
    parser.add_argument(
        "--processes", type=int, default=2, help="number of simultaneous runs, each with one thread (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmark/studies"), help="output folder (default: %(default)s)")
    for name, values in choices.items():
        parser.add_argument(f"--{name}", nargs="+", choices=values, default=values, help="which ones to run (default: all)")
    return parser


def parse_arguments(
    description: str | None, timesteps: int | None, seeds: int = 5, **choices: Sequence[str]
) -> argparse.Namespace:
    """:return: Arguments that the user has given, see :func:`parser_of`"""
    return parser_of(description, timesteps, seeds, **choices).parse_args()


def run_grid(run: Callable[[Job], list[Row]], settings: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> list[Row]:
    """
    :param run: Trains one model and returns the rows that it logged. It must be a function of a module, so that other
        processes find it
    :param settings: Settings, each of which is run with every seed
    :param arguments: Arguments from :func:`parse_arguments`
    :return: The rows of all runs in the order of the settings, with the settings and the seed as first columns
    """
    jobs = [Job(each, seed, arguments.timesteps) for each in settings for seed in range(arguments.seeds)]
    start = time.perf_counter()
    rows: list[Row] = []
    with multiprocessing.get_context("spawn").Pool(arguments.processes, partial(th.set_num_threads, 1)) as pool:
        for n_done, (job, logged) in enumerate(zip(jobs, pool.imap(run, jobs), strict=True), start=1):
            rows += [{**job.settings, "seed": job.seed, **row} for row in logged]
            if n_done % max(len(jobs) // 10, 1) == 0:
                print(f"{n_done} of {len(jobs)} runs, {time.perf_counter() - start:.0f} s", flush=True)
    return rows


def run_task(
    run: Callable[[Job], list[Row]], task: str, timesteps: int, arms: Sequence[str], arguments: argparse.Namespace, path: Path
) -> None:
    """
    Run one task with some arms. Their rows replace the existing ones in the table.

    :param run: Function that trains one model, as in :func:`run_grid`
    :param task: Name of the task
    :param timesteps: Number of timesteps of each run, unless the arguments have a lower limit
    :param arms: Names of the arms
    :param arguments: Arguments from :func:`parse_arguments`
    :param path: File of the table
    """
    timesteps = min(timesteps, arguments.timesteps or timesteps)
    print(f"{task}, {timesteps} steps", flush=True)
    settings = [{"task": task, "arm": arm} for arm in arms]
    done = run_grid(run, settings, argparse.Namespace(**{**vars(arguments), "timesteps": timesteps}))
    write_csv(path, [row for row in read_csv(path) if row["task"] != task or row["arm"] not in arms] + done)


def averaging_gradients(decay: float) -> dict[str, Any]:
    """
    :param decay: Decay rate of Adam's average of the gradients, 0.9 by default
    :return: ``policy_kwargs`` with it, and with what else SB3 gives Adam
    """
    return {"optimizer_kwargs": {"betas": (decay, 0.999), "eps": 1e-5}}


def finals(rows: Iterable[Row], task: str, arm: str) -> np.ndarray:
    """Mean returns at the end of the training, from the last row of each seed, shape ``(n_seeds,)``."""
    last = {row["seed"]: row["evaluation"] for row in select(rows, task=task, arm=arm)}
    return np.array(list(last.values()))


class Recorder(BaseCallback):
    """
    Records logged values after every few updates.

    :param keys: Keys of the logger, by the name of the column in the table
    :param every: Number of updates between two records
    :param measure: Function that returns further values to record
    """

    def __init__(self, keys: dict[str, str], every: int = 1, measure: Callable[[PPOExt], Row] | None = None):
        super().__init__()
        self.keys, self.every, self.measure = keys, every, measure
        self.rows: list[Row] = []
        self._n_rollouts = 0

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        # The previous update has logged; the next dump, which clears the values, comes after the rollout.
        if self._n_rollouts > 0 and self._n_rollouts % self.every == 0:
            self._record()
        self._n_rollouts += 1

    def _on_training_end(self) -> None:
        self._on_rollout_start()

    def _record(self) -> None:
        assert isinstance(self.model, PPOExt)
        values = self.model.logger.name_to_value
        row: Row = {"timesteps": self.num_timesteps}
        row |= {name: float(values[key]) for name, key in self.keys.items() if key in values}
        if self.model.ep_info_buffer:
            row["return"] = float(np.mean([episode["r"] for episode in self.model.ep_info_buffer]))
        if self.measure is not None:
            row |= self.measure(self.model)
        self.rows.append(row)


# Tables


def select(rows: Iterable[Row], **settings: Any) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in settings.items())]


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write a table, compressed. Numbers have four significant digits; a cell is empty if the run did not log the column."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: f"{value:.4g}" if isinstance(value, float) else value for name, value in row.items()})
    # Without the time, the same rows make the same file. It is replaced as a whole, so that it is never half-written.
    part = path.with_suffix(".part")
    part.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))
    part.replace(path)


def read_csv(path: Path) -> list[Row]:
    """Read a table of :func:`write_csv`, without the empty cells. The list is empty if there is no such file."""
    if not path.exists():
        return []
    with gzip.open(path, "rt", newline="") as file:
        return [{name: _value(text) for name, text in row.items() if text} for row in csv.DictReader(file)]


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def per_seed(rows: Sequence[Row], column: str, start: float = 0.0, end: float = np.inf) -> np.ndarray:
    """
    :param rows: Rows of one kind of run
    :param column: Column to average
    :param start: Timestep after which rows count
    :param end: Timestep up to which rows count
    :return: Means over the rows of each seed, shape ``(n_seeds,)``
    """
    seeds = sorted({row["seed"] for row in rows})
    return np.array([np.mean([r[column] for r in select(rows, seed=seed) if start < r["timesteps"] <= end]) for seed in seeds])


def mean_and_std(values: np.ndarray, digits: int = 2) -> str:
    spread = values.std(ddof=1) if len(values) > 1 else 0.0
    return f"{values.mean():.{digits}f} ± {spread:.{digits}f}"


def print_table(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    widths = [max(len(line[column]) for line in [header, *lines]) for column in range(len(header))]
    print(f"\n{title}")
    for line in [header, *lines]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


# Plots


def curve(rows: Sequence[Row], column: str) -> tuple[np.ndarray, np.ndarray]:
    """
    :param rows: Rows of one kind of run
    :param column: Column to plot
    :return: Timesteps, shape ``(n,)``, and values, shape ``(n, n_seeds)``
    """
    rows = [row for row in rows if column in row]
    timesteps = sorted({row["timesteps"] for row in rows})
    values = [[row[column] for row in rows if row["timesteps"] == timestep] for timestep in timesteps]
    return np.array(timesteps), np.array(values)


def thinned(timesteps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """
    :param timesteps: Timesteps, shape ``(n,)``
    :param values: Values, shape ``(n, ...)``
    :return: At most :data:`MAX_POINTS` of them, at equal distances, the last one included
    """
    every = -(-len(timesteps) // MAX_POINTS)
    return timesteps[::-every][::-1], values[::-every][::-1]


def plot_curve(axes: Axes, rows: Sequence[Row], column: str, **style: Any) -> None:
    """Draw the mean over the seeds, and a band from the minimum to the maximum, of every few rows where there are many."""
    timesteps, values = thinned(*curve(rows, column))
    [line] = axes.plot(timesteps / 1000, values.mean(axis=1), **style)
    axes.fill_between(
        timesteps / 1000, values.min(axis=1), values.max(axis=1), color=line.get_color(), alpha=0.12, linewidth=0
    )


def grid_of_axes(n_panels: int, **kwargs: Any) -> tuple[Figure, np.ndarray]:
    """
    Panels in two columns, which can be read on a phone and in print; what is left over of the last row is blank.

    :param n_panels: Number of panels
    :param kwargs: Keyword arguments of ``plt.subplots``
    :return: The figure, and its panels, shape ``(n_panels,)``
    """
    n_columns, n_rows = min(n_panels, 2), -(-n_panels // 2)
    size = (3.6 * n_columns + 1.2 * (n_columns == 1), 2.5 * n_rows + 0.5)
    figure, axes = plt.subplots(n_rows, n_columns, figsize=size, layout="constrained", squeeze=False, **kwargs)
    for ax in axes.flat[n_panels:]:
        ax.set_axis_off()
    return figure, axes.ravel()[:n_panels]


def legend_below(figure: Figure, axes: Axes, note: str = BAND, n_columns: int = 3) -> None:
    """
    A legend below all panels, with a line that says what the lines and bands are.

    :param figure: The figure
    :param axes: Panel whose labels the legend has
    :param note: What the lines and bands are
    :param n_columns: Number of columns of the legend
    """
    handles, labels = axes.get_legend_handles_labels()
    width = round(15 * figure.get_figwidth())  # of more characters, a narrow figure would cut some off
    title = "\n".join(textwrap.fill(line, width) for line in note.splitlines())
    figure.legend(handles, labels, loc="outside lower center", ncols=n_columns, title=title, title_fontsize=8)


def save_plot(figure: Figure, path: Path) -> None:
    """
    :param figure: Figure, which is closed
    :param path: Path of the file
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without the date, the same figure makes the same file.
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


# Environments


class BatchedEnv(VecEnv):
    """
    Environments of one kind that are stepped together in NumPy, with a time limit that truncates episodes.

    The agent learns from the rewards, while the reported returns are those of the score.

    :param n_envs: Number of environments
    :param observation_space: Observation space of each environment
    :param action_space: Action space of each environment
    :param episode_length: Time limit, in steps
    :param seed: Seed of the pseudo random generator
    """

    def __init__(self, n_envs: int, observation_space: spaces.Box, action_space: spaces.Space, episode_length: int, seed: int):
        super().__init__(n_envs, observation_space, action_space)
        self.episode_length, self.rng = episode_length, np.random.default_rng(seed)
        self.n_steps_done = 0
        self.lengths, self.scores = np.zeros(n_envs, int), np.zeros(n_envs)

    def begin(self, which: np.ndarray) -> None:
        """
        Start new episodes.

        :param which: Mask of the environments, shape ``(n_envs,)``
        """
        raise NotImplementedError

    def observe(self) -> np.ndarray:
        """:return: Observations in a new array, shape ``(n_envs, observation_dim)``, float32"""
        raise NotImplementedError

    def act(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """:return: Rewards, scores, and whether the episode has terminated; each of shape ``(n_envs,)``"""
        raise NotImplementedError

    def reset(self) -> np.ndarray:
        self._begin(np.ones(self.num_envs, bool))
        return self.observe()

    def step_async(self, actions: np.ndarray) -> None:
        self.actions = actions

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict]]:
        rewards, scores, terminated = self.act(self.actions)
        self.n_steps_done += self.num_envs
        self.lengths += 1
        self.scores += scores
        truncated = (self.lengths >= self.episode_length) & ~terminated
        observations, dones = self.observe(), terminated | truncated
        infos: list[dict] = [{} for _ in range(self.num_envs)]
        for index in np.flatnonzero(dones):
            infos[index] = {
                "terminal_observation": observations[index].copy(),
                "TimeLimit.truncated": bool(truncated[index]),
                "episode": {"r": float(self.scores[index]), "l": int(self.lengths[index]), "t": 0.0},
            }
        if dones.any():
            self._begin(dones)
            observations = self.observe()
        return observations, rewards.astype(np.float32), dones, infos

    def _begin(self, which: np.ndarray) -> None:
        self.lengths[which], self.scores[which] = 0, 0.0
        self.begin(which)

    def close(self) -> None:
        pass

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        # The constructor asks for "render_mode".
        return [getattr(self, attr_name, None)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        setattr(self, attr_name, value)

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        raise NotImplementedError

    def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs
