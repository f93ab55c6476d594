"""The plots of the documentation are those of its tables."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_plot_has_its_table():
    """Each plot is an SVG file beside the table that it is drawn from, and is shown on a page."""
    plots = [*(ROOT / "docs").rglob("*.svg"), *(ROOT / "benchmark").rglob("*.svg")]
    assert len(plots) > 10
    assert not [
        plot for plot in plots if not any(plot.with_suffix(suffix).exists() for suffix in (".csv", ".csv.gz", ".json"))
    ]
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "benchmark" / "README.md"]
    shown = {
        (page.parent / target).resolve() for page in pages for target in re.findall(r"!\[[^]]*\]\((\S+)\)", page.read_text())
    }
    assert set(plots) <= shown


@pytest.mark.slow
@pytest.mark.integration
def test_plots_can_be_drawn_again(tmp_path):
    """`scripts/redraw.py` draws each plot of a table, with labelled axes and a legend, without training anything."""
    for folder in ("scripts", "docs/performance", "benchmark"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in tmp_path.rglob("*.svg"):
        path.write_text("")
    subprocess.run([sys.executable, str(tmp_path / "scripts" / "redraw.py")], check=True, timeout=600)
    for path in [*(ROOT / "docs").rglob("*.svg"), *(ROOT / "benchmark").rglob("*.svg")]:
        text = (tmp_path / path.relative_to(ROOT)).read_text()
        for words in (
            "1000 timesteps|relative to SB3|epoch|interquartile mean|steps per second|environments",
            "means over|means where|a line for each seed|medians over|fastest of",
        ):
            assert re.search(f">[^<]*({words})", text), path.name
