"""
Draw the plots of the documentation again, from the tables that the benchmarks and studies have written: after a change of what
they look like, without training anything.

    python scripts/redraw.py
"""

import json
import sys
from importlib import import_module
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).parents[1]
SCRIPTS, STUDIES = ROOT / "scripts", ROOT / "benchmark" / "studies"
# Our arms in the suites of the learning benchmark, each of which has one more
OURS = {"ppo_ext", "former default", "best trial"}


def redraw_study(table: Path) -> None:
    """
    :param table: Table of a study, whose plot lies beside it
    """
    name = table.name.removesuffix(".csv.gz")
    common, study = import_module("common"), import_module(name)
    common.save_plot(study.plot(common.read_csv(table)), table.with_name(f"{name}.svg"))


def redraw_returns(table: Path) -> None:
    """
    :param table: Evaluations of a suite of the learning benchmark
    """
    report, suites = import_module("returns_report"), import_module("returns_suites")
    runs = pd.read_csv(table)
    if table.stem in suites.ABLATIONS:
        arms = list(suites.SUITES[table.stem][1])
        report.save(
            report.plot_ablation(report.ablation(runs, runs["task"].unique(), arms), arms[0]), table.with_suffix(".svg")
        )
        return
    # Other arms than the first two are listed, and not drawn.
    drawn = suites.pair(table.stem) if table.stem in suites.SUITES else runs["arm"].unique()
    of_arm = {arm: set(each["task"]) for arm, each in runs.groupby("arm") if arm in drawn}
    tasks = list(runs["task"].unique())
    arms = sorted((arm for arm in of_arm if of_arm[arm] == set(tasks)), key=OURS.__contains__)
    if len(arms) < 2:
        return  # So far, one of the arms has not been run.
    report.save(report.plot(runs, tasks, arms), table.with_suffix(".svg"))


def main() -> None:
    sys.path[:0] = [str(SCRIPTS), str(STUDIES)]
    for plot in sorted(STUDIES.glob("*.svg")):
        redraw_study(plot.with_suffix(".csv.gz"))
    for plot in sorted((ROOT / "benchmark").glob("*.svg")):
        redraw_returns(plot.with_suffix(".csv"))
    folder = ROOT / "docs" / "performance"
    import_module("benchmark_speed").plot(
        json.loads((folder / "benchmark.json").read_text())["results"], folder / "benchmark.svg"
    )
    import_module("benchmark_growth").plot(json.loads((folder / "growth.json").read_text()), folder / "growth.svg")


if __name__ == "__main__":
    main()
