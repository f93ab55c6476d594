"""
Tables of `search_default.py`, and who is left in its race. Not a script.

Scores of different tasks are compared by rank: that of a run is the share of the other runs of its task that it beats, where
ties count half; one half is average. Sampled runs are ranked among themselves, and so are those of the race.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from default_split import DEVELOPMENT, DISCRETE
from returns_report import BOOTSTRAPS, mean_improvement, table, with_interval, with_spread
from search_space import (
    ACTIVE,
    CANDIDATES,
    CHOSEN,
    CONTINUOUS_ONLY,
    DISCRETE_ONLY,
    FIRST_SEED,
    HALVED_AFTER,
    LEVERS,
    RACERS,
    REFERENCES,
    kind_of,
)

KINDS = {"all tasks": set(DEVELOPMENT), "discrete": DISCRETE, "continuous": set(DEVELOPMENT) - DISCRETE}
BASELINES = list(REFERENCES)[:2]


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


def sampled(rows: pd.DataFrame) -> pd.DataFrame:
    """
    :param rows: Rows of runs
    :return: The ranked rows of the sampled ones, with a column for each lever, which has the level as text
    """
    rows = ranked(rows[rows["levels"].notna() & rows["configuration"].str.isdecimal()]).reset_index(drop=True)
    levels = [json.loads(text) for text in rows["levels"]]
    return rows.assign(**{lever: [_text(of.get(lever)) for of in levels] for lever in LEVERS})


def _text(level: Any) -> str:
    """The same for a level in `search_space.py` and in a file, where a tuple is a list"""
    return str(tuple(level)) if isinstance(level, list) else str(level)


def effects(rows: pd.DataFrame, lever: str) -> dict[Any, tuple[float, np.ndarray, int]]:
    """
    :param rows: Sampled rows, see :func:`sampled`
    :param lever: Name of a lever
    :return: For each further level, the difference of the mean rank to that of the first level, its interval from a bootstrap
        over the runs of each level, and the number of runs with that level
    """
    rng = np.random.default_rng(0)
    needed, accepted = ACTIVE.get(lever, (lever, set(LEVERS[lever])))
    rows = rows[rows[needed].isin(list(map(_text, accepted)))]
    groups = {level: rows["rank"][rows[lever] == _text(level)].to_numpy() for level in LEVERS[lever]}
    first = groups[LEVERS[lever][0]]
    result = {}
    for level in LEVERS[lever][1:]:
        values = groups[level]
        if min(len(first), len(values)) > 1:
            draws = _resampled(values, rng) - _resampled(first, rng)
            result[level] = float(values.mean() - first.mean()), np.percentile(draws, [2.5, 97.5]), len(values)
    return result


def _resampled(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Means of as many values, drawn with replacement, shape ``(n_bootstraps,)``"""
    return rng.choice(values, (BOOTSTRAPS, len(values))).mean(axis=1)


def effect_lines(rows: pd.DataFrame) -> list[list[str]]:
    """A line for each level of each lever, except for the first ones."""
    of_kind = {kind: rows[rows["task"].isin(tasks)] for kind, tasks in KINDS.items()}
    lines = []
    for lever, (first, *others) in LEVERS.items():
        by_kind = {kind: effects(of_kind[kind], lever) for kind in KINDS if _acts(lever, kind)}
        for level in others:
            cells = [_cell(by_kind.get(kind, {}).get(level)) for kind in KINDS]
            lines.append([lever, str(first), str(level), *cells])
    return lines


def _acts(lever: str, kind: str) -> bool:
    """Whether a lever is sampled for all tasks of a kind."""
    only = {**dict.fromkeys(CONTINUOUS_ONLY, "continuous"), **dict.fromkeys(DISCRETE_ONLY, "discrete")}
    return kind == only.get(lever, kind)


def _cell(effect: tuple[float, np.ndarray, int] | None) -> str:
    if effect is None:
        return "-"
    point, (low, high), count = effect
    text = f"{point:+.2f} ({low:+.2f} to {high:+.2f})"
    return (f"**{text}**" if low > 0 or high < 0 else text) + f", {count}"


def of_race(rows: pd.DataFrame) -> pd.DataFrame:
    """:return: The ranked rows of candidates and references, and those of the chosen candidates again, as `searched`"""
    names = {task: {*CANDIDATES[kind_of(task)], *REFERENCES} for task in DEVELOPMENT}
    rows = ranked(rows[[name in names[task] for name, task in zip(rows["configuration"], rows["task"], strict=True)]])
    is_chosen = [name == CHOSEN[kind_of(task)] for name, task in zip(rows["configuration"], rows["task"], strict=True)]
    return pd.concat([rows, rows[is_chosen].assign(configuration="searched")], ignore_index=True)


def racers(rows: pd.DataFrame, number: int, tasks: list[str]) -> dict[str, list[str]]:
    """
    :param rows: Rows of the runs that are done
    :param number: Number of a round of the race
    :param tasks: Names of the tasks
    :return: Names of the candidates that run in it, for each task: all at first; after some rounds, the better half goes on,
        for each kind of actions by itself
    """
    of_kind = {kind: _left(rows[rows["task"].isin(KINDS[kind])], RACERS[kind], number) for kind in RACERS}
    return {task: of_kind[kind_of(task)] for task in tasks}


def _left(rows: pd.DataFrame, left: list[str], number: int) -> list[str]:
    for n_rounds in HALVED_AFTER:
        if n_rounds <= number:
            before = rows[rows["configuration"].isin([*left, *REFERENCES]) & (rows["seed"] < FIRST_SEED + n_rounds)]
            ranks = ranks_of(ranked(before), set(before["task"]))
            left = sorted(left, key=lambda name: -ranks.get(name, 0.0))[: (len(left) + 1) // 2]
    return left


def scores_of(rows: pd.DataFrame, configuration: str, task: str) -> np.ndarray:
    return rows[(rows["configuration"] == configuration) & (rows["task"] == task)]["score"].fillna(-np.inf).to_numpy()


def configuration_lines(rows: pd.DataFrame, tasks: set[str]) -> list[list[str]]:
    """
    The candidates and references that have runs of all tasks, with the probability that a run of theirs is better than one of
    SB3's defaults, without and with ``VecNormalize``.
    """
    ranks = ranks_of(rows, tasks).sort_values(ascending=False)
    lines = []
    for name in ranks.index:
        n_runs = int(rows[(rows["configuration"] == name)].groupby("task").size().min())
        cells = [
            _better(rows, name, baseline, tasks) if baseline in ranks and baseline != name else "-" for baseline in BASELINES
        ]
        lines.append([name, str(n_runs), f"{ranks[name]:.2f}", *cells])
    return lines


def _better(rows: pd.DataFrame, name: str, baseline: str, tasks: set[str]) -> str:
    ours, theirs = ([scores_of(rows, arm, task) for task in sorted(tasks)] for arm in (name, baseline))
    return with_interval(*mean_improvement(ours, theirs))


def task_lines(rows: pd.DataFrame, kind: str) -> list[list[str]]:
    """Scores of references and candidates on each task of a kind, and of the best sampled run."""
    lines = []
    for task in (task for task in DEVELOPMENT if kind_of(task) == kind):
        cells = [scores_of(rows, name, task) for name in (*REFERENCES, *CANDIDATES[kind])]
        others = rows[(rows["task"] == task) & rows["configuration"].str.isdecimal()].sort_values("score")
        best = "-" if others.empty else f"{others['score'].iloc[-1]:.1f} ({others['configuration'].iloc[-1]})"
        steps = f"{DEVELOPMENT[task] / 1000:.0f}k"
        lines.append([task, steps, *(with_spread(cell) if len(cell) else "-" for cell in cells), best])
    return lines


def report(rows: pd.DataFrame, folder: Path) -> None:
    """
    Print and write the tables.

    :param rows: Rows of runs
    :param folder: Folder of the page
    """
    parts = _race_parts(of_race(rows))
    screened = sampled(rows)
    if len(screened) > 1:
        title = f"## Levers, from {len(screened)} runs"
        parts += [title, table(["lever", "from", "to", *KINDS], effect_lines(screened))]
    for kind in CANDIDATES:
        header = ["task", "steps", *REFERENCES, *CANDIDATES[kind], "best sampled run"]
        parts += [f"## Scores, {kind}", table(header, task_lines(rows, kind))]
    text = "\n\n".join(parts)
    print(f"\n{text}", flush=True)
    (folder / "search.md").write_text(f"# Table: search for the default\n\n{text}\n")


def _race_parts(rows: pd.DataFrame) -> list[str]:
    header = ["configuration", "runs of a task", "rank", *(f"P(better than {name})" for name in BASELINES)]
    parts = []
    for kind, tasks in KINDS.items():
        if len(lines := configuration_lines(rows, tasks)) > 1:
            parts += [f"## Race, {kind}", table(header, lines)]
    return parts
