"""The examples of docs/hybrid_actions.md run."""

import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs" / "hybrid_actions.md"


@pytest.mark.filterwarnings("ignore:Evaluation environment is not wrapped")
def test_examples(tmp_path, capsys):
    """They are one script, here with fewer steps."""
    script = tmp_path / "script.py"
    code = "\n".join(re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL))
    assert "40_000" in code
    script.write_text(code.replace("40_000", "2_048"))
    runpy.run_path(str(script))
    printed = capsys.readouterr().out
    assert "'mate': np.int64(" in printed or "'mate': " in printed
