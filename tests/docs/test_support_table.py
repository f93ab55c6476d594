"""The table "Can I use?" is what the engines say, and the README is short."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.integration
def test_support_table():
    """Each cell of the table is what the engine answers."""
    lines = list(runpy.run_path(str(ROOT / "scripts" / "support_table.py"))["lines"]())
    for page in ("README.md", "docs/index.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert "\n".join(lines) in text, f"in {page}, paste what `python scripts/support_table.py` prints"


def test_length_of_the_readme():
    """What a newcomer reads before "More" is a screen or two."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text[: text.index("## More")].split()) <= 700
