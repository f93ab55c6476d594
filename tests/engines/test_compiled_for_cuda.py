"""
`backend="compile"` on CUDA, without a card: losses and policies are compiled for an H200 to the end, on the pretended device.
Nothing is computed.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.cpp_libraries import compiler
from support.pretended_cuda.compiled_cases import CASES

TESTS = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="needs `pip install triton`"),
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler for the pretended device"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What became of each case."""
    out = tmp_path_factory.mktemp("compiled") / "found.json"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "support.pretended_cuda.compiled_cases", str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("case", CASES)
def test_one_graph(case, found):
    """
    The loss is one CUDA graph, with one more for a smaller last minibatch, and so is the policy; a graph writes into none of
    its inputs.
    """
    outcome = found[case]
    assert outcome["error"] is None
    assert not outcome["eager"]
    acts = "transformer" not in case  # with its cache, which is not compiled
    assert len(outcome["graphs"]) == 1 + acts + ("remainder" in case)
    for graph in outcome["graphs"]:
        assert graph == {"reasons": [], "mutated": [], "devices": ["cuda"]}
