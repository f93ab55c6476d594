"""The benchmark on a GPU runs in miniature on a CPU, and judges what it has measured."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
import benchmark_gpu  # noqa: E402


def run(out, *parts):
    """Results of the script, and its tables."""
    command = [sys.executable, SCRIPTS / "benchmark_gpu.py", "--device", "cpu", "--small", "--out", out, "--parts", *parts]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([str(word) for word in command], check=True, capture_output=True, env=environment)
    return json.loads((out / "gpu.json").read_text())["results"], (out / "gpu.md").read_text()


def failures(found):
    """What failed, of nested results."""
    if not isinstance(found, dict):
        return []
    own = [found["failed"]] if "failed" in found else []
    return own + [text for part in found.values() for text in failures(part)]


@pytest.mark.slow
@pytest.mark.integration
def test_waits_and_devices(tmp_path):
    """Waits are counted and devices compared; on a CPU, nothing can be said of budgets and of the fastest device."""
    results, tables = run(tmp_path, "waits", "device")
    assert not failures(results)
    assert set(results) == {"waits", "device"}
    counts = results["waits"]["Pendulum in PyTorch"]
    assert counts["update"]["waits"] == counts["update"]["copies to the host"] == 0
    assert counts["4 further steps, beyond the environments"].keys() == {"waits", "copies to the host", ".item()"}
    assert all(found['`device="auto"`'] == {"takes": "cpu", "fastest": "not known"} for found in results["device"].values())
    assert "| CNN, 8 images |" in tables


@pytest.mark.integration
@pytest.mark.slow
def test_all_parts(tmp_path):
    """Every contender trains, and is compared with the others; without CUDA, the tests on it are skipped."""
    results, tables = run(tmp_path, *benchmark_gpu.PARTS)
    has_rsl_rl = importlib.util.find_spec("rsl_rl") is not None
    assert set(failures(results)) <= (set() if has_rsl_rl else {"ModuleNotFoundError: No module named 'rsl_rl'"})
    assert results["tests"]["tests"]["pytest -m gpu"]["finished"] == "yes"
    ours = results["iterations"]["Pendulum in PyTorch"]["device"]
    assert ours.keys() >= {"update, times SB3", "iteration, times SB3"}
    assert ("update, times rsl_rl" in ours) == has_rsl_rl
    assert results["policies"]["MlpTransformerPolicy"]["auto"]["iteration, times RecurrentPPO"] > 0
    assert "not measured" not in tables or not has_rsl_rl


def test_ratios():
    """Ratios are medians over the rounds, to the first contender and to rsl_rl."""
    results = {
        "SB3": {"collect": [4.0, 4.0, 4.0], "update": [2.0, 6.0, 4.0]},
        "device": {"collect": [1.0, 1.0, 1.0], "update": [1.0, 1.0, 1.0]},
        "rsl_rl": {"failed": "ImportError"},
    }
    found = benchmark_gpu.summarised(results)
    assert found["device"]["update, times SB3"] == 4.0
    assert found["device"]["iteration, times SB3"] == 4.0
    assert found["device"]["update, ms"] == 1000.0
    assert found["rsl_rl"] == {"failed": "ImportError"}


def test_targets():
    """A target is reached, missed, or not measured."""
    results = {
        "iterations": {"CartPole of gymnax": {"device": {"update, times SB3": 5.0, "iteration, times SB3": 19.9}}},
        "device": {"CNN": {'`device="auto"`': {"takes": "cuda", "fastest": "cpu"}}},
    }
    judged = {line[0]: line[2] for line in benchmark_gpu.targets(results)}
    assert judged["update: SB3's at least 5 times (CartPole of gymnax)"] == "reached"
    assert judged["whole iteration: SB3's through NumPy at least 20 times (CartPole of gymnax)"] == "missed"
    assert judged["update: rsl_rl's at least 1.5 times (Pendulum in PyTorch)"] == "not measured"
    assert judged['`device="auto"` is the fastest (CNN)'] == "missed"


def test_contender_that_fails():
    """A contender that fails is named with its error, and the others are measured."""

    class Quick:
        def collect(self):
            time.sleep(0.001)

        update = collect

    def broken():
        raise RuntimeError("out of memory")

    results = benchmark_gpu.take_turns({"one": Quick, "other": broken}, 2, benchmark_gpu.Clock(60), "cpu")
    assert len(results["one"]["update"]) == 2
    assert results["other"] == {"failed": "RuntimeError: out of memory"}


def test_spent_time(capsys):
    """What there is no time for is left out, with a line."""
    clock = benchmark_gpu.Clock(0)
    assert benchmark_gpu.take_turns({"one": object}, 1, clock, "cpu") == {"one": {"failed": "no time left"}}
    assert "left out, since the time is spent: one" in capsys.readouterr().out


def test_tests_keep_the_path(tmp_path, monkeypatch):
    """The tests on a GPU find the packages of `PYTHONPATH`, behind those of the checkout."""
    given = {}

    class Done:
        def __init__(self, command, **options):
            given.update(options["env"])

        def wait(self, seconds):
            return 0

    monkeypatch.setenv("PYTHONPATH", "/site")
    monkeypatch.setattr(benchmark_gpu.subprocess, "Popen", Done)
    list(benchmark_gpu.run_tests(benchmark_gpu.SMALL, "cpu", 1, benchmark_gpu.Clock(9), tmp_path))
    assert given["PYTHONPATH"].split(os.pathsep) == [str(SCRIPTS.parent), "/site"]


def test_what_was_measured_is_kept(tmp_path, monkeypatch):
    """Results are written after each contest, so that those are there that were measured before the script is killed."""

    def killed(*args):
        yield "first", {"device": {"update, ms": 3.0}}
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmark_gpu, "PARTS", {"waits": killed})
    monkeypatch.setattr(benchmark_gpu, "build_in_place", lambda: False)
    monkeypatch.setattr(sys, "argv", ["benchmark_gpu.py", "--device", "cpu", "--small", "--out", str(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        benchmark_gpu.main()
    assert json.loads((tmp_path / "gpu.json").read_text())["results"]["waits"]["first"]["device"] == {"update, ms": 3.0}


@pytest.mark.parametrize(("is_there", "status", "expected"), [(True, 0, False), (False, 0, True), (False, 1, False)])
def test_modules_are_built_in_the_checkout(is_there, status, expected, monkeypatch):
    """The modules in C are built where the package is imported from, if they are missing; a compiler may be missing, too."""
    commands = []

    def run(command, **options):
        commands.append((command[1:], options["cwd"]))
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(benchmark_gpu, "find_spec", lambda name: name if is_there else None)
    monkeypatch.setattr(benchmark_gpu.subprocess, "run", run)
    assert benchmark_gpu.build_in_place() == expected
    assert commands == ([] if is_there else [(["setup.py", "-q", "build_ext", "--inplace"], SCRIPTS.parent)])
