"""
Tables and plots of `benchmark_returns.py`. Not a script.

Each row is an evaluation, with ``task``, ``arm``, ``seed``, ``timesteps``, ``return``, the ``seconds`` of the run from start
to end and, except in older files, its ``cpu_seconds``.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import scipy
from returns_suites import BY_SB3

from sb3_ppo_ext.plot_run import BAND, COLORS, STYLE

mpl.use("agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

plt.rcParams.update(STYLE)

# Titles of the tables, which are pages of the documentation
TITLES = {
    "presets": "Table: presets and RL Zoo's tuned PPO",
    "default": "Table: the former `default` and SB3's defaults",
    "unseen": "Table: the former `default` on tasks that played no part in choosing it",
    "memory": "Table: history-based policies",
    "robots": "Table: robots of MuJoCo, one million steps",
    "discrete": "Table: discrete actions, one million steps",
    "robots_development": "Table: changes of `default` on the robots, one million steps",
    "candidates": "Table: candidates for `default`",
    "held_out": "Table: `default` on tasks that chose nothing",
    "ablation": "Table: single changes of the presets",
    "tuning": "Table: tuning",
}
# The strongest baseline that there is for all tasks
NORMALIZED = "SB3's defaults + VecNormalize"
# Number of evaluations whose mean is the score of a run
N_LAST = 2
BOOTSTRAPS = 5000


def select(runs: pd.DataFrame, **columns: Any) -> pd.DataFrame:
    for name, value in columns.items():
        runs = runs[runs[name] == value] if name in runs else runs.iloc[:0]
    return runs


def per_seed(runs: pd.DataFrame, task: str, arm: str, value: Callable[[pd.DataFrame], float]) -> np.ndarray:
    """:return: One value per seed, in the order of the seeds, shape ``(n_seeds,)``"""
    return np.array([value(run.sort_values("timesteps")) for _, run in select(runs, task=task, arm=arm).groupby("seed")])


def score(run: pd.DataFrame) -> float:
    return float(run["return"].tail(N_LAST).mean())


def probability_of_improvement(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The probability that a run of ours is better than one of theirs; ties count half."""
    return float(probabilities_of_improvement(ours, theirs))


def probabilities_of_improvement(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """The same for each row of many runs, shapes ``(..., n)`` and ``(..., m)``."""
    differences = ours[..., :, np.newaxis] - theirs[..., np.newaxis, :]
    return np.mean((differences > 0) + 0.5 * (differences == 0), axis=(-2, -1))


def task_lines(runs: pd.DataFrame, tasks: Sequence[str], theirs: str, ours: str, times: dict[str, float]) -> list[list[str]]:
    lines = []
    for task in tasks:
        one, other = per_seed(runs, task, theirs, score), per_seed(runs, task, ours, score)
        steps = select(runs, task=task)["timesteps"].max()
        p_value = scipy.stats.mannwhitneyu(other, one).pvalue if min(len(one), len(other)) > 1 else np.nan
        texts = [task, f"{steps / 1000:.0f}k", with_spread(one), with_spread(other)]
        cpu = f"{times[task]:.1f}" if task in times else "-"
        speedup = median_seconds(runs, task, theirs) / median_seconds(runs, task, ours)
        better = f"{probability_of_improvement(other, one):.2f}"
        lines.append([*texts, better, p_value_text(p_value), cpu, "-" if np.isnan(speedup) else f"{speedup:.1f}"])
    return lines


def with_spread(values: np.ndarray) -> str:
    spread = values.std(ddof=1) if len(values) > 1 else 0.0
    digits = _digits(values.mean())
    return f"{_number(values.mean())} ± {spread:.{digits}f} ({len(values)})"


def _number(value: float) -> str:
    return f"{round(value, _digits(value)) + 0.0:.{_digits(value)}f}"  # no "-0"


def _digits(value: float) -> int:
    return 0 if abs(value) >= 10 else 1


def p_value_text(value: float) -> str:
    if np.isnan(value):
        return "-"
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


@dataclass(frozen=True)
class Ablated:
    """
    An arm of an ablation.

    :param means: Mean score on each task, shape ``(n_tasks,)``
    :param n_runs: Number of runs of a task, of the task that has the fewest
    :param iqm: Interquartile mean, where 0 is the worst run of a task in any arm and 1 the best one, and its interval
    :param improvement: Probability of improvement over the baseline, and its interval
    """

    means: np.ndarray
    n_runs: int
    iqm: tuple[float, np.ndarray]
    improvement: tuple[float, np.ndarray]


def ablation(runs: pd.DataFrame, tasks: Sequence[str], arms: Sequence[str]) -> dict[str, Ablated]:
    """
    :param runs: Rows of evaluations
    :param tasks: Names of the tasks
    :param arms: Names of the arms, the baseline first
    :return: What changes do, by arm, for the arms that have runs of every task; each is compared over all of its runs
    """
    arms = [arm for arm in arms if set(tasks) == set(select(runs, arm=arm)["task"])]
    scores = {arm: [per_seed(runs, task, arm, score) for task in tasks] for arm in arms}
    low, high = (
        np.array([edge(np.concatenate(task)) for task in zip(*scores.values(), strict=True)]) for edge in (np.min, np.max)
    )
    result = {}
    for arm, values in scores.items():
        n_runs = min(map(len, values))
        scaled = (np.stack([each[:n_runs] for each in values], axis=1) - low) / np.maximum(high - low, 1e-12)
        points, intervals = intervals_of({arm: scaled}, interquartile_mean)
        iqm = float(np.ravel(points[arm])[0]), np.ravel(intervals[arm])
        means = np.array([each.mean() for each in values])
        result[arm] = Ablated(means, n_runs, iqm, mean_improvement(values, scores[arms[0]]))
    return result


def ablation_lines(arms: dict[str, Ablated], baseline: str) -> list[list[str]]:
    return [
        [
            arm,
            str(each.n_runs),
            *(f"{mean:.0f}" for mean in each.means),
            with_interval(*each.iqm),
            "-" if arm == baseline else with_interval(*each.improvement),
        ]
        for arm, each in arms.items()
    ]


def times_of(runs: pd.DataFrame) -> str:
    """:return: Column of the times of the runs: of the processor, if the file has them, else from start to end"""
    return "cpu_seconds" if "cpu_seconds" in runs and runs["cpu_seconds"].notna().any() else "seconds"


def median_seconds(runs: pd.DataFrame, task: str, arm: str) -> float:
    """:return: NaN if the runs have no times of the kind that others have"""
    column = times_of(runs)
    return float(pd.Series(per_seed(runs, task, arm, lambda run: run[column].iloc[0])).median())


def aggregate_lines(runs: pd.DataFrame, tasks: Sequence[str], theirs: str, ours: str) -> list[list[str]]:
    """
    The interquartile mean over as many seeds as every task has, where 0 is the worst run of a task and 1 the best one, and the
    probability of improvement over all seeds. Both have 95 % confidence intervals from a bootstrap stratified over the tasks.
    """
    scores = {arm: [per_seed(runs, task, arm, score) for task in tasks] for arm in (theirs, ours)}
    points, intervals = intervals_of(normalized(scores), interquartile_mean)
    lines = [[f"IQM, {arm}", with_interval(points[arm], intervals[arm])] for arm in (theirs, ours)]
    return [*lines, ["probability of improvement", with_interval(*mean_improvement(scores[ours], scores[theirs]))]]


def by_sb3_lines(runs: pd.DataFrame, tasks: Sequence[str], theirs: str, ours: str) -> list[list[str]]:
    """
    Scores of the baseline's runs that SB3 has computed, in the order of the seeds, the range of its other runs, and how many
    times less time ours take than those of SB3.
    """
    lines = []
    for task in tasks:
        scores, others = (per_seed(runs, task, arm, score) for arm in (theirs + BY_SB3, theirs))
        if len(scores):
            speedup = median_seconds(runs, task, theirs + BY_SB3) / median_seconds(runs, task, ours)
            span = f"{_number(others.min())} to {_number(others.max())}"
            lines.append([task, ", ".join(map(_number, scores)), span, f"{speedup:.1f}"])
    return lines


def normalized(scores: dict[str, list[np.ndarray]]) -> dict[str, np.ndarray]:
    """:return: Normalised scores of each arm, shape ``(n_seeds, n_tasks)``"""
    n_seeds = min(len(values) for tasks in scores.values() for values in tasks)
    first = {arm: np.stack([values[:n_seeds] for values in tasks], axis=1) for arm, tasks in scores.items()}
    both = np.concatenate(list(first.values()))
    low, high = both.min(axis=0), both.max(axis=0)
    return {arm: (values - low) / np.maximum(high - low, 1e-12) for arm, values in first.items()}


def mean_improvement(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> tuple[float, np.ndarray]:
    """
    The same as rliable's ``metrics.probability_of_improvement`` with its interval, for tasks with different numbers of seeds.

    :param ours: Our scores for each task
    :param theirs: The scores of the baseline for each task
    :return: The mean over the tasks, and the ends of the interval, shape ``(2,)``
    """
    rng = np.random.default_rng(0)
    pairs = list(zip(ours, theirs, strict=True))

    def resampled(values: np.ndarray) -> np.ndarray:
        return rng.choice(values, (BOOTSTRAPS, len(values)))

    draws = np.mean([probabilities_of_improvement(resampled(one), resampled(other)) for one, other in pairs], axis=0)
    return float(np.mean([probability_of_improvement(*pair) for pair in pairs])), np.percentile(draws, [2.5, 97.5])


def interval_over_tasks(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> np.ndarray:
    """
    :param ours: Our scores for each task
    :param theirs: The scores of the baseline for each task
    :return: Ends of the 95 % interval of :func:`mean_improvement` from a bootstrap over the tasks, which says what other tasks
        may show, shape ``(2,)``
    """
    each = [probability_of_improvement(*pair) for pair in zip(ours, theirs, strict=True)]
    draws = np.random.default_rng(0).choice(each, (BOOTSTRAPS, len(each))).mean(axis=1)
    return np.percentile(draws, [2.5, 97.5])


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    from rliable import metrics

    return np.array([metrics.aggregate_iqm(values)])


def intervals_of(scores: dict[str, Any], statistic: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Reproducible interval estimates of rliable."""
    from rliable import library  # It takes two seconds, with what it imports.

    # rliable samples from NumPy's global generator, even if `random_state` is given.
    np.random.seed(0)
    return library.get_interval_estimates(scores, statistic, reps=BOOTSTRAPS)


def with_interval(point: Any, interval: np.ndarray) -> str:
    low, high = np.ravel(interval)
    return f"{float(np.ravel(point)[0]):.2f} ({low:.2f} to {high:.2f})"


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *lines])


def plot(runs: pd.DataFrame, tasks: Sequence[str], arms: Sequence[str]) -> Figure:
    """
    Plot the mean over the seeds, and a band from the minimum to the maximum. Of SB3's defaults with ``VecNormalize``, there is
    a line without a band, if it has runs of all tasks.
    """
    n_rows = -(-len(tasks) // 2)
    figure, axes = plt.subplots(n_rows, 2, figsize=(7.2, 2.5 * n_rows + 0.5), layout="constrained", squeeze=False)
    for ax in axes.flat[len(tasks) :]:
        ax.set_axis_off()
    seeds = select(runs, arm=NORMALIZED).groupby("task")["seed"].nunique().reindex(tasks, fill_value=0)
    alone = ", ".join(seeds.index[seeds == 1])
    dashed = f"{NORMALIZED} (one seed of {alone})" if alone else NORMALIZED
    for ax, task in zip(axes.flat, tasks, strict=False):
        for arm, color in zip(arms, (COLORS["ppo"], COLORS["ppo_ext"]), strict=True):
            curves = select(runs, task=task, arm=arm).groupby("timesteps")["return"]
            mean, low, high = curves.mean(), curves.min(), curves.max()
            ax.plot(mean.index / 1000, mean, color=color, label=arm)
            ax.fill_between(mean.index / 1000, low, high, color=color, alpha=0.15, linewidth=0)
        if seeds.min() > 0 and NORMALIZED not in arms:
            mean = select(runs, task=task, arm=NORMALIZED).groupby("timesteps")["return"].mean()
            ax.plot(mean.index / 1000, mean, "--", color="black", linewidth=1, label=dashed)
        ax.set(xlabel="1000 timesteps", ylabel="return")
        ax.set_title(task, fontsize="medium" if len(task) < 36 else "x-small")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, title=BAND, title_fontsize=8)
    return figure


def plot_ablation(arms: dict[str, Ablated], baseline: str) -> Figure:
    """Plot interquartile means and probabilities of improvement with their intervals, a line for each arm."""
    figure, axes = plt.subplots(1, 2, figsize=(7.2, 0.3 * len(arms) + 1.2), layout="constrained", sharey=True)
    columns = {"interquartile mean": "iqm", f"P(better than\n{baseline})": "improvement"}
    for ax, (title, column) in zip(axes, columns.items(), strict=True):
        for row, (arm, each) in enumerate(arms.items()):
            point, (low, high) = getattr(each, column)
            color = COLORS["ppo"] if arm == baseline else COLORS["ppo_ext"]
            ax.plot([low, high], [row, row], color=color, linewidth=5, alpha=0.3, solid_capstyle="butt")
            ax.plot(point, row, "o", color=color, markersize=4)
        ax.set(yticks=range(len(arms)), yticklabels=list(arms))
        ax.set_title(title, fontsize="small")
    axes[0].invert_yaxis()
    axes[1].axvline(0.5, color="gray", linewidth=0.8)
    figure.supxlabel("points: means over tasks and seeds; bars: 95 % confidence intervals", fontsize=8)
    return figure


def save(figure: Figure, path: Path) -> None:
    """
    :param figure: Figure, which is closed
    :param path: Path of an SVG file; without the date, the same figure makes the same file
    """
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def report(suite: str, runs: pd.DataFrame, arms: Sequence[str], folder: Path, first: Sequence[str] = ()) -> None:
    """
    Print and write the tables, and plot the learning curves, of the tasks that have runs of both arms.

    :param suite: Name of the suite, and of the files
    :param runs: Rows of evaluations
    :param arms: Names of the baseline and of our arm
    :param folder: Folder of the files
    :param first: Parts of the page that come before
    """
    theirs, ours = arms
    tasks = [task for task in runs["task"].unique() if set(arms) <= set(select(runs, task=task)["arm"])]
    if not tasks:
        return
    path = folder / "times.json"
    times = json.loads(path.read_text()).get(suite, {}) if path.exists() else {}
    run = "speed-up, run" if times_of(runs) == "cpu_seconds" else "speed-up, run (wall clock)"
    header = ["task", "steps", theirs, ours, "P(better)", "p", "speed-up, step", run]
    parts = [
        *((*first, f"## {ours} and {theirs}") if first else ()),
        table(header, task_lines(runs, tasks, theirs, ours, times)),
        table(["all tasks", ""], aggregate_lines(runs, tasks, theirs, ours)),
    ]
    if by_sb3 := by_sb3_lines(runs, tasks, theirs, ours):
        parts.append(table(["task", theirs + BY_SB3, f"{theirs}, lowest to highest score", f"{run}, {ours}"], by_sb3))
    text = "\n\n".join(parts)
    print(f"\n{suite}\n\n{text}", flush=True)
    (folder / f"{suite}.md").write_text(f"# {TITLES.get(suite, suite)}\n\n{text}\n")
    save(plot(runs, tasks, arms), folder / f"{suite}.svg")


def report_ablation(suite: str, runs: pd.DataFrame, arms: Sequence[str], folder: Path) -> None:
    """
    Print and write the table of the arms that have runs of every task, and plot it.

    :param suite: Name of the suite, and of the files
    :param runs: Rows of evaluations
    :param arms: Names of the arms, the baseline first
    :param folder: Folder of the files
    """
    tasks = list(runs["task"].unique())
    ablated = ablation(runs, tasks, arms)
    if len(ablated) < 2:
        return
    header = ["", "seeds", *tasks, "IQM", f"better than {arms[0]}"]
    text = table(header, ablation_lines(ablated, arms[0]))
    print(f"\n{suite}\n\n{text}", flush=True)
    (folder / f"{suite}.md").write_text(f"# {TITLES.get(suite, suite)}\n\n{text}\n")
    save(plot_ablation(ablated, arms[0]), folder / f"{suite}.svg")
