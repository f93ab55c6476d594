"""Wrong calls of the extension module raise a TypeError or a ValueError, and do no harm."""

import subprocess
import sys

import numpy as np
import pytest
from support import extension_calls
from support.cases import one_in

_mlp = pytest.importorskip("sb3_ppo_ext.engines.native._mlp", reason="the extension module was not built")


@pytest.mark.integration
@pytest.mark.parametrize("seed", one_in(3, range(3)))
def test_wrong_calls(seed):
    """
    Each argument of each entry point is wrong in each way, then arguments are drawn at random, with each instruction set: all
    raise, and nothing outside of the arrays is written. Code that runs within a call may call the module. Nothing leaks.
    Without memory, a MemoryError. All in a process that a crash would end.
    """
    command = [sys.executable, extension_calls.__file__, _mlp.__file__, str(seed), "2000"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"{result.returncode} in {result.stdout[-200:]}: {result.stderr[-5000:]}"
    assert result.stdout.endswith("done\n")


def floats(*shape):
    return np.ones(shape, np.float32)


def linear(n_in, n_out):
    return floats(n_out, n_in), floats(n_out), floats(n_out, n_in), floats(n_out)


def norm(n):
    return (floats(n),) * 4


MESSAGES = [
    ("Adam", ([5],), TypeError, "a tensor must be a tuple of four arrays"),
    ("Adam", ([(floats(3), floats(2), floats(3), floats(3))],), ValueError, r"a gradient .* shape \(3,\), .* shape \(2,\)"),
    ("Network", ([None],), TypeError, "a layer must be a tuple of four arrays, .* name of an activation, or the index"),
    ("Network", ([(floats(3, 0), floats(3), floats(3, 0), floats(3))],), ValueError, "inputs and outputs"),
    ("Network", ([(floats(3, 2, 1),) * 4],), ValueError, r"a weight .* shape \(n, n\)"),
    ("Network", ([(np.ones((3, 2)),) * 4],), ValueError, r"a weight .* not of format d, shape \(3, 2\)"),
    ("Network", ([(floats(2, 3).T,) * 4],), ValueError, "a weight must be a C-contiguous array of float32"),
    ("Network", ([(None,) * 4],), TypeError, "a weight must be an array of float32, not NoneType"),
    ("Network", ([linear(2, 3), norm(4), linear(4, 1)],), ValueError, "do not fit together: 4 inputs after 3 outputs"),
    ("Network", ([norm(3), linear(3, 1)],), ValueError, "first and the last layer must be linear"),
    ("Network", ([linear(2, 3), norm(3)],), ValueError, "first and the last layer must be linear$"),
    ("Network", (["tanh", linear(3, 1)],), ValueError, "must follow a linear layer or a normalisation"),
    ("Network", ([linear(2, 3), "tanh", "tanh", linear(3, 1)],), ValueError, "must follow a linear layer or a normalisation$"),
    (
        "Network",
        ([linear(3, 3), linear(3, 3), 1, linear(3, 1)],),
        ValueError,
        "a sum must have the index of a layer further up",
    ),
    ("Network", ([linear(3, 3), linear(3, 3), -1, linear(3, 1)],), ValueError, "the index of a layer further up"),
    ("Network", ([linear(3, 3), linear(3, 3), 10**30, linear(3, 1)],), ValueError, "index of a layer further up"),
    ("Network", ([linear(3, 3), "relu", linear(3, 3), 0, linear(3, 1)],), ValueError, "no activation or sum follows"),
    ("Network", ([linear(3, 2), linear(2, 3), 0, linear(3, 1)],), ValueError, "terms of the same size"),
    ("Network", ([linear(3, 3), *([norm(3), 0] * 2), linear(3, 1)],), ValueError, "can be added once"),
    ("gae", (*[floats(5)] * 3, *[floats(2)] * 2, 0.9, 0.9, floats(5)), ValueError, r"rewards .* \(n, 2\), .* \(5,\)"),
    ("use", (5,), TypeError, "name of an instruction set, not int"),
]


@pytest.mark.parametrize(("name", "args", "error", "message"), MESSAGES, ids=[row[-1] for row in MESSAGES])
def test_messages(name, args, error, message):
    """The message names the argument, what it must be, and what it is."""
    with pytest.raises(error, match=message):
        getattr(_mlp, name)(*args)


def test_network_has_its_parameters_from_the_start():
    """A new network computes with the values that its parameters have, before anybody calls `pack`."""
    out = floats(1, 3)
    _mlp.Network([(floats(3, 2), floats(3), floats(3, 2), floats(3))]).forward(floats(1, 2), out)
    np.testing.assert_array_equal(out, np.full((1, 3), 3, np.float32))
