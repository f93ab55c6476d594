"""
Tables of `search_default.py`. Not a script.

Scores of different tasks are compared by rank: that of a run is the share of the other runs of its task that it beats, where
ties count half. A configuration's rank is the mean over the tasks; one half is average.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from default_split import DEVELOPMENT, DISCRETE
from returns_report import BOOTSTRAPS, mean_improvement, table, with_interval, with_spread
from search_space import ACTIVE, CONTINUOUS_ONLY, LEVERS, REFERENCES, sample

KINDS = {"all tasks": set(DEVELOPMENT), "discrete": DISCRETE, "continuous": set(DEVELOPMENT) - DISCRETE}
BASELINES = list(REFERENCES)[:2]
# Sampled configurations in the table of the best ones
N_BEST = 10


def ranked(rows: pd.DataFrame) -> pd.DataFrame:
    """
    :param rows: Rows of runs
    :return: The rows with a column ``rank``, in which a run that ended with numbers that are not finite is the worst
    """
    rows = rows.assign(score=rows["score"].fillna(-np.inf))
    places = rows.groupby("task")["score"].rank(method="average")
    others = rows.groupby("task")["score"].transform("size") - 1
    return rows.assign(rank=(places - 1) / others.clip(lower=1))


def ranks_of(rows: pd.DataFrame, tasks: set[str]) -> pd.Series:
    """
    :param rows: Ranked rows
    :param tasks: Names of tasks
    :return: Mean rank on these tasks, of the configurations that have runs of all of them
    """
    runs = rows[rows["task"].isin(tasks)].groupby(["configuration", "task"])["rank"].mean().unstack()
    return runs.reindex(columns=sorted(tasks)).dropna().mean(axis=1)


def sampled_ranks(rows: pd.DataFrame, tasks: set[str]) -> pd.Series:
    """:return: The same for the sampled configurations, ranked among themselves"""
    return ranks_of(ranked(rows[~rows["configuration"].isin(list(REFERENCES))]), tasks)


def effects(ranks: pd.Series, lever: str) -> dict[Any, tuple[float, np.ndarray, int]]:
    """
    :param ranks: Mean rank by number of the configuration
    :param lever: Name of a lever
    :return: For each further level, the difference of the mean rank to that of the first level, its interval from a bootstrap
        over the configurations of each level, and the number of configurations with that level
    """
    rng = np.random.default_rng(0)
    levels = {number: sample(int(number)) for number in ranks.index}
    needed, accepted = ACTIVE.get(lever, (lever, set(LEVERS[lever])))
    groups = {
        level: np.array([ranks[number] for number, of in levels.items() if of[lever] == level and of[needed] in accepted])
        for level in LEVERS[lever]
    }
    first = groups[LEVERS[lever][0]]
    result = {}
    for level in LEVERS[lever][1:]:
        values = groups[level]
        if min(len(first), len(values)) > 1:
            draws = [_resampled(values, rng) - _resampled(first, rng) for _ in range(BOOTSTRAPS)]
            result[level] = float(values.mean() - first.mean()), np.percentile(draws, [2.5, 97.5]), len(values)
    return result


def _resampled(values: np.ndarray, rng: np.random.Generator) -> float:
    return float(rng.choice(values, len(values)).mean())


def effect_lines(rows: pd.DataFrame) -> list[list[str]]:
    """A line for each level of each lever, except for the first ones."""
    found = {kind: sampled_ranks(rows, tasks) for kind, tasks in KINDS.items()}
    lines = []
    for lever, (first, *others) in LEVERS.items():
        by_kind = {kind: effects(ranks, lever) for kind, ranks in found.items()}
        for level in others:
            cells = [_cell(by_kind[kind].get(level), kind, lever) for kind in KINDS]
            n_configurations = by_kind["all tasks"].get(level, (0, 0, 0))[2]
            lines.append([lever, str(first), str(level), str(n_configurations), *cells])
    return lines


def _cell(effect: tuple[float, np.ndarray, int] | None, kind: str, lever: str) -> str:
    if effect is None or (lever in CONTINUOUS_ONLY and kind != "continuous"):
        return "-"
    point, (low, high), _ = effect
    text = f"{point:+.2f} ({low:+.2f} to {high:+.2f})"
    return f"**{text}**" if low > 0 or high < 0 else text


def scores_of(rows: pd.DataFrame, configuration: str, task: str) -> np.ndarray:
    return rows[(rows["configuration"] == configuration) & (rows["task"] == task)]["score"].fillna(-np.inf).to_numpy()


def configuration_lines(rows: pd.DataFrame, tasks: set[str]) -> list[list[str]]:
    """
    The references and the best sampled configurations that have runs of all tasks, with the probability that a run of theirs
    is better than one of SB3's defaults, without and with ``VecNormalize``.
    """
    ranks = ranks_of(ranked(rows), tasks).sort_values(ascending=False)
    sampled = [name for name in ranks.index if name not in REFERENCES]
    shown = [name for name in ranks.index if name in REFERENCES or name in sampled[:N_BEST]]
    lines = []
    for name in shown:
        n_runs = int(rows[(rows["configuration"] == name)].groupby("task").size().min())
        cells = [
            _better(rows, name, baseline, tasks) if baseline in ranks and baseline != name else "-" for baseline in BASELINES
        ]
        lines.append([name, str(n_runs), f"{ranks[name]:.2f}", *cells])
    return lines


def _better(rows: pd.DataFrame, name: str, baseline: str, tasks: set[str]) -> str:
    ours, theirs = ([scores_of(rows, arm, task) for task in sorted(tasks)] for arm in (name, baseline))
    return with_interval(*mean_improvement(ours, theirs))


def task_lines(rows: pd.DataFrame) -> list[list[str]]:
    """Scores of the references on each task, and of the best sampled configuration of the task."""
    lines = []
    for task, timesteps in DEVELOPMENT.items():
        cells = [scores_of(rows, name, task) for name in REFERENCES]
        others = rows[(rows["task"] == task) & ~rows["configuration"].isin(list(REFERENCES))].sort_values("score")
        best = "-" if others.empty else f"{others['score'].iloc[-1]:.1f} ({others['configuration'].iloc[-1]})"
        lines.append([task, f"{timesteps / 1000:.0f}k", *(with_spread(cell) if len(cell) else "-" for cell in cells), best])
    return lines


def report(rows: pd.DataFrame, folder: Path) -> None:
    """
    Print and write the tables.

    :param rows: Rows of runs
    :param folder: Folder of the page
    """
    parts = [
        "## References",
        table(["task", "steps", *REFERENCES, "best sampled run"], task_lines(rows)),
        *_configuration_parts(rows),
    ]
    if len(sampled_ranks(rows, set(DEVELOPMENT))) > 1:
        parts += ["## Levers", table(["lever", "from", "to", "configurations", *KINDS], effect_lines(rows))]
    text = "\n\n".join(parts)
    print(f"\n{text}", flush=True)
    (folder / "search.md").write_text(f"# Table: random search for the default\n\n{text}\n")


def _configuration_parts(rows: pd.DataFrame) -> list[str]:
    header = ["configuration", "runs of a task", "rank", *(f"P(better than {name})" for name in BASELINES)]
    parts = []
    for kind, tasks in KINDS.items():
        if len(lines := configuration_lines(rows, tasks)) > 1:
            parts += [f"## Configurations, {kind}", table(header, lines)]
    return parts
