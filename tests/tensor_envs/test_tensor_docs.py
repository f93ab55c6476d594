"""The examples of docs/tensor_environments.md run, except those that need a simulator, which are read by Python."""

import ast
import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs" / "tensor_environments.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
RUNNABLE = [code for code in EXAMPLES if not code.startswith("# needs ")]


@pytest.mark.integration  # environments in JAX are compiled
@pytest.mark.filterwarnings("ignore:The environment does not give the last observations")
@pytest.mark.parametrize("code", RUNNABLE, ids=range(len(RUNNABLE)))
def test_examples(code, tmp_path, monkeypatch):
    """Each example trains, with fewer steps."""
    if "Jax" in code:
        pytest.importorskip("gymnax")
    monkeypatch.chdir(tmp_path)
    assert "100_000" in code
    script = tmp_path / "script.py"
    script.write_text(code.replace("100_000", "2_048"))
    runpy.run_path(str(script))


def test_other_examples():
    """The examples that need a simulator are Python, and name one of the table."""
    others = [code for code in EXAMPLES if code not in RUNNABLE]
    assert len(others) == 3
    for code in others:
        ast.parse(code)
        assert re.match(r"# needs (brax|ManiSkill|Isaac Lab)\b", code)
