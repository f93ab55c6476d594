"""
Tables of `benchmark_returns.py` that compare our arm with each baseline. Not a script.

At equal steps, a score is the mean of the last two of ten evaluations. At equal CPU time, both arms have the time in which the
faster one, per step, trains for all steps of the task: the curve of the slower one is cut off where that time is over. Its
score is the mean of the last evaluation before the end of the time and of the first one after it, in favour of the slower
one. The CPU times of a step are measured in turns, those of a baseline with the package that it comes from.

Where all runs of both arms reach the best possible return, the task is named and left out of the summary: it cannot tell them
apart.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
import scipy
from returns_report import (
    interval_over_tasks,
    mean_improvement,
    p_value_text,
    per_seed,
    probability_of_improvement,
    score,
    select,
    table,
    with_interval,
    with_spread,
)
from returns_suites import BY_SB3

# Scores of our arm and of a baseline on a task, as they are compared
Scores = Callable[[str, str], tuple[np.ndarray, np.ndarray]]
SIGNIFICANT = 0.05
# Best possible returns, where the definition of the task says them
BEST_RETURNS = {"CartPole-v1": 500.0, "EnvPool/Catch-v0": 1.0}


def baselines_of(runs: pd.DataFrame, arms: Sequence[str], ours: str) -> list[str]:
    """
    :param runs: Rows of evaluations
    :param arms: Names of all arms
    :param ours: Name of our arm
    :return: Names of the other ones that have runs of a task of which ours has runs, without those that SB3 computes for
        comparison
    """
    tasks = set(select(runs, arm=ours)["task"])
    return [arm for arm in arms if arm != ours and not arm.endswith(BY_SB3) and tasks & set(select(runs, arm=arm)["task"])]


def at_equal_steps(runs: pd.DataFrame, ours: str) -> Scores:
    """:return: Scores at the end of the training"""
    return lambda task, baseline: (per_seed(runs, task, ours, score), per_seed(runs, task, baseline, score))


def at_equal_time(runs: pd.DataFrame, ours: str, ratios: Mapping[str, Mapping[str, float]]) -> Scores:
    """
    :param runs: Rows of evaluations
    :param ours: Name of our arm
    :param ratios: CPU time of a step of each baseline, as a multiple of ours, by task and baseline
    :return: Scores after the same CPU time; none without a ratio
    """

    def after(task: str, arm: str, share: float) -> np.ndarray:
        return per_seed(runs, task, arm, lambda run: score_after(run, share))

    def scores(task: str, baseline: str) -> tuple[np.ndarray, np.ndarray]:
        ratio = ratios.get(task, {}).get(baseline)
        if ratio is None:
            return np.zeros(0), np.zeros(0)
        return after(task, ours, min(ratio, 1.0)), after(task, baseline, min(1 / ratio, 1.0))

    return scores


def score_after(run: pd.DataFrame, share: float) -> float:
    """
    :param run: Evaluations of a run, in their order
    :param share: Share of its steps
    :return: Mean of the last evaluation before that share, if there is one, and the first one after it; for all steps, the
        score
    """
    steps = run["timesteps"].to_numpy() / run["timesteps"].max()
    if share >= 1:
        return score(run)
    after = int(np.searchsorted(steps, share))
    return float(run["return"].iloc[max(after - 1, 0) : after + 1].mean())


def baseline_lines(tasks: Sequence[str], ours: str, baselines: Sequence[str], scores: Scores) -> list[list[str]]:
    """A line for each baseline of a task, the strongest one marked. What a baseline wins comes first."""
    won: list[list[str]] = []
    lost: list[list[str]] = []
    for task in tasks:
        compared = {baseline: scores(task, baseline) for baseline in baselines}
        compared = {baseline: pair for baseline, pair in compared.items() if min(map(len, pair))}
        strongest = max(compared, key=lambda baseline: float(compared[baseline][1].mean()), default=None)
        for baseline, (one, other) in compared.items():
            name = f"**{baseline}**" if baseline == strongest else baseline
            better = f"{probability_of_improvement(one, other):.2f}"
            lines = won if other.mean() > one.mean() else lost
            lines.append([task, name, with_spread(other), with_spread(one), better, p_value_text(p_value(one, other))])
    return won + lost


def p_value(one: np.ndarray, other: np.ndarray) -> float:
    return float(scipy.stats.mannwhitneyu(one, other).pvalue) if min(len(one), len(other)) > 1 else np.nan


def summary_lines(tasks: Sequence[str], baselines: Sequence[str], scores: Scores) -> list[list[str]]:
    """
    For each baseline, on how many tasks it has the higher mean, on how many of them significantly, and the mean over the tasks
    of the probability that a run of ours is better, with its intervals over the seeds and over the tasks.
    """
    lines = []
    for baseline in baselines:
        pairs = [pair for task in tasks if min(map(len, pair := scores(task, baseline))) and not are_best(task, *pair)]
        if pairs:
            behind = [pair for pair in pairs if pair[1].mean() > pair[0].mean()]
            significant = [pair for pair in behind if p_value(*pair) < SIGNIFICANT]
            sides = [one for one, _ in pairs], [other for _, other in pairs]
            counts = [str(len(pairs)), str(len(behind)), str(len(significant))]
            low, high = interval_over_tasks(*sides)
            lines.append([baseline, *counts, with_interval(*mean_improvement(*sides)), f"{low:.2f} to {high:.2f}"])
    return lines


def are_best(task: str, one: np.ndarray, other: np.ndarray) -> bool:
    """:return: Whether all scores are the best possible return of the task"""
    return task in BEST_RETURNS and bool(np.concatenate([one, other]).min() >= BEST_RETURNS[task])


def left_out(tasks: Sequence[str], baselines: Sequence[str], scores: Scores) -> list[str]:
    """:return: A paragraph that names the tasks that a summary leaves out, if there are any"""
    names = {
        baseline: [task for task in tasks if min(map(len, pair := scores(task, baseline))) and are_best(task, *pair)]
        for baseline in baselines
    }
    listed = [f"{', '.join(tasks)} ({baseline})" for baseline, tasks in names.items() if tasks]
    return [f"Left out of this summary, since all runs reach the best possible return: {'; '.join(listed)}."] if listed else []


def baseline_parts(
    runs: pd.DataFrame, tasks: Sequence[str], ours: str, baselines: Sequence[str], ratios: Mapping[str, Mapping[str, float]]
) -> list[str]:
    """
    :param runs: Rows of evaluations
    :param tasks: Names of the tasks
    :param ours: Name of our arm
    :param baselines: Names of the baselines
    :param ratios: CPU time of a step of each baseline, as a multiple of ours, by task and baseline
    :return: Parts of a page, with tables at equal steps and, where there are times, at equal CPU time
    """
    parts = []
    for title, scores in {
        "At equal steps": at_equal_steps(runs, ours),
        "At equal CPU time": at_equal_time(runs, ours, ratios),
    }.items():
        if lines := baseline_lines(tasks, ours, baselines, scores):
            header = ["baseline", "tasks", "baseline ahead", "of these, p < 0.05", f"P({ours} better)", "over tasks"]
            summary = table(header, summary_lines(tasks, baselines, scores))
            parts += [f"## {title}", summary, *left_out(tasks, baselines, scores)]
            parts.append(table(["task", "baseline", "its score", ours, "P(better)", "p"], lines))
    return parts
