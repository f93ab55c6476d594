"""
The tests marked `gpu` on the pretended device, in a process of its own, and as on a machine without RL Zoo: PyTorch has to be
imported after the device.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch as th
from support.cpp_libraries import compiler

TESTS = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler for the pretended device"),
    pytest.mark.skipif(th.version.cuda is not None, reason="this PyTorch has CUDA: `-m gpu` runs them there"),
]
# A case of each kind, for the default suite
FEW = {
    "test_gpu_device.py": [
        "test_policies[MlpPolicy]",
        "test_observations_arrive_in_their_rows[dict]",
        "test_page_locked_memory_is_used",
        "test_transfers[{}]",
        "test_no_wait_in_the_steps_of_a_rollout[TorchPendulum]",
        "test_loading_a_zip_of_the_gpu_decides_anew[auto-cpu]",
        "test_policies_that_are_not_finite_are_refused[TorchCartPole]",
    ],
    "test_gpu.py": [
        "test_gsde_predicts_before_it_is_trained[device]",
        "test_bootstrap_in_one_batch",
        "test_outputs_of_graphs_are_kept[{}]",
        "test_second_gpu[{}]",
        "test_current_gpu_changes",
        "test_environments_on_another_gpu_are_refused",
        "test_ranks_have_environments_on_gpus_of_their_own",
    ],
}


def run(*arguments, plugins=("support.pretended_cuda.plugin", "support.bare_machine"), cwd=TESTS.parent):
    """Exit status and output of pytest on the pretended device."""
    paths = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore::UserWarning"]
    for plugin in plugins:
        options += ["-p", plugin]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_few_tests_of_the_gpu():
    """Tests of each kind pass on the pretended device; none is skipped."""
    cases = [f"tests/engines/{file}::{case}" for file, names in FEW.items() for case in names]
    status, output = run(*cases)
    assert status == 0, output[-6000:]
    assert f"{len(cases)} passed" in output
    assert "skipped" not in output


FAULTS = """
import pytest
import torch as th
from support.device_waits import assert_within, counted
from support.pretended_cuda import device


def copied_too_late():
    page_locked = th.zeros(4).pin_memory()
    on_device = page_locked.to("cuda", non_blocking=True)
    page_locked.fill_(1.0)
    th.cuda.synchronize()
    return on_device


def test_hazard():
    copied_too_late()


def test_budget():
    numbers = th.ones(3, device="cuda")
    assert_within(1, lambda: [number.item() for number in numbers])


def test_what_is_told():
    on_device = th.arange(4.0, device="cuda")
    assert counted(lambda: on_device.cpu()) == (1, 1, 0)
    assert counted(lambda: on_device[on_device > 1]).waits == 1
    assert counted(lambda: on_device + 1) == (0, 0, 0)
    with pytest.raises(RuntimeError, match="found at least two devices"):
        on_device + th.ones(4, device="cuda:1")
    early = th.empty(4).pin_memory().copy_(on_device, non_blocking=True)
    assert early.tolist() != [0.0, 1.0, 2.0, 3.0]
    th.cuda.synchronize()
    assert early.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert copied_too_late().tolist() == [0.0] * 4
    assert device.hazards.pop().what.startswith("HAZARD")
    assert th.zeros(1, device="cuda").device == th.device("cuda", 0)
    assert not th.empty(9, device="cuda").eq(0).any()
"""


@pytest.mark.slow
def test_faults_are_found(tmp_path):
    """Page-locked memory that is written too early fails a test, and so do more waits than its budget."""
    (tmp_path / "test_faults.py").write_text(FAULTS)
    status, output = run("test_faults.py", plugins=["support.pretended_cuda.plugin"], cwd=tmp_path)
    assert status == 1
    assert "2 failed" in output or "1 failed, 2 passed, 1 error" in output, output[-3000:]
    assert "HAZARD page-locked memory was written before it was copied" in output
    assert "Waits(waits=3, to_host=0, items=3), at most 1 are allowed" in output
