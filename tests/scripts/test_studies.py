"""The studies run, short of what makes them studies; what the documentation says of speed is what the benchmark measured."""

import gzip
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STUDIES = ROOT / "benchmark" / "studies"


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "timesteps", "tasks"),
    [
        ("reward_scale", 10240, []),
        ("bounds", 20480, []),
        ("adaptive_lr", 8192, []),
        ("backends", 4096, []),
        ("environments", 4096, ["--tasks", "Pendulum-v1", "Reacher-v5"]),
        # The others take longer, and LunarLander needs Box2D, which the tests do without.
        ("memory", 2048, ["--tasks", "T-maze 10", "CartPoleNoVel-v1"]),
        ("robustness", 60_000, ["--tasks", "counting", "--arms", "transformer", "frames", "--rates", "1e-3"]),
        ("held_back", 1024, []),
        ("mountain_car", 4096, []),
        ("hybrid_actions", 8192, []),
        ("tensor_learning", 40_960, []),
        ("ranks", 8192, []),
        ("action_masks", 16_384, []),
        ("asymmetric", 8192, []),
        ("auxiliary_losses", 8192, []),
        ("action_distributions", 1024, ["--tasks", "Pendulum-v1", "MountainCarContinuous-v0", "BangBang"]),
    ],
)
def test_study(name, timesteps, tasks, tmp_path):
    """Each study writes its table and its plot, and prints a summary."""
    command = [sys.executable, STUDIES / f"{name}.py", "--seeds", "1", "--timesteps", timesteps, *tasks, "--out", tmp_path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    printed = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True, env=environment).stdout
    assert "mean ± std over seeds" in printed
    assert len(gzip.decompress((tmp_path / f"{name}.csv.gz").read_bytes()).splitlines()) > 10
    assert (tmp_path / f"{name}.svg").stat().st_size > 10_000


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "n_runs", "heading"),
    [
        ("recall", ["--arms", "frames", "--timesteps", 4096], 4 * 3, "frames: share of right answers"),
        (
            "popgym_easy",
            ["--tasks", "MineSweeper", "PositionOnlyPendulum", "--timesteps", 2048],
            2 * 6,
            "Return, at the end, mean ± std over seeds",
        ),
        ("memory_entry", ["--tasks", "counting", "--timesteps", 4096], 3, "return, mean ± std over seeds"),
        (
            "default_screen",
            ["--kinds", "discrete", "--runs", 1, "--tasks", "CartPole-v1", "--arms", "VecNormalize", "--timesteps", 2048],
            1 + 1,
            "difference of mean ranks to the first level",
        ),
        ("default_neighbours", ["--designs", "careful", "--timesteps", 2048], 1, "effect on the rank, careful"),
        ("longer_training", ["--tasks", "Swimmer-v5", "--timesteps", 2048], 2, "Return after 2,048 steps, mean ± std"),
    ],
    ids=["recall", "popgym_easy", "memory_entry", "default_screen", "default_neighbours", "longer_training"],
)
def test_runs_are_not_repeated(name, options, n_runs, heading, tmp_path):
    """A resumable study has a row for each run, prints its table, and leaves alone what it has run."""
    if name == "popgym_easy":
        pytest.importorskip("popgym")
    command = [sys.executable, STUDIES / f"{name}.py", *options, "--seeds", 1, "--out", tmp_path]
    tables = []
    for _ in range(2):
        printed = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True).stdout
        tables.append(gzip.decompress((tmp_path / f"{name}.csv.gz").read_bytes()))
    assert tables[0] == tables[1]
    assert len(tables[0].splitlines()) == 1 + n_runs
    assert printed.startswith(f"\n{heading}")


def printed_lines(code):
    """Lines that code prints which imports the studies as they import each other."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=STUDIES).stdout.splitlines()


@pytest.mark.slow
@pytest.mark.integration
def test_memory_study_normalizes_as_the_entries_say():
    """The study of memory trains and evaluates with the observations that the entries of RL Zoo and ours ask for."""
    code = (
        "import memory\n"
        "for arm in ('transformer', 'RecurrentPPO'):\n"
        "    model, test = memory.make_model('PendulumNoVel-v1', arm, 0)\n"
        "    env = model.get_vec_normalize_env()\n"
        "    print(env.norm_obs, env.norm_reward, env.gamma, test.norm_obs, test.norm_reward, test.training)\n"
    )
    assert printed_lines(code)[-2:] == ["False True 0.95 False False False", "True True 0.9 True False False"]


@pytest.mark.slow
@pytest.mark.integration
def test_arms_with_a_longer_average_of_the_gradients():
    """In the studies of transformers, the decay rate of Adam is the one that the arm is named after; the default is SB3's."""
    code = (
        "import memory, robustness\n"
        "for arm in ('shared transformer', 'shared transformer, momentum 0.95', 'shared transformer, momentum 0.98'):\n"
        "    models = memory.make_model('T-maze 10', arm, 0)[0], robustness.make_model('counting', arm, 1e-3, 0)\n"
        "    print(*(model.policy.optimizer.defaults[name] for model in models for name in ('betas', 'eps')))\n"
    )
    rates = (0.9, 0.95, 0.98)
    assert printed_lines(code)[-3:] == [f"{(rate, 0.999)} 1e-05 {(rate, 0.999)} 1e-05" for rate in rates]


@pytest.mark.slow
@pytest.mark.integration
def test_arms_with_an_adaptive_rate():
    """In the study of robustness, the KL divergence that the learning rate adapts to is constant or falls."""
    code = (
        "import robustness\n"
        "others = 'frames, falling KL', 'RecurrentPPO, falling KL', *(\n"
        "    f'{policy}, {kind} KL' for policy in ('transformer', 'frames') for kind in ('short proportional', 'held')\n"
        ")\n"
        "kinds = 'adaptive rate', 'small falling KL', 'large falling KL', 'short falling KL', 'falling KL'\n"
        "for arm in (*(f'shared transformer, {kind}' for kind in kinds), *others):\n"
        "    adaptive = robustness.make_model('counting', arm, 3e-4, 0, robustness.PPOExt).adaptive_lr\n"
        "    adaptive.update(0.004, progress_remaining=1.0)\n"
        "    adaptive.update(0.004, progress_remaining=0.5)\n"
        "    print(adaptive.value)\n"
    )
    rates = [float(line) for line in printed_lines(code)[-11:]]
    proportional_and_held = [1.5 * (5 / 4) ** 0.5, 1.5**2]
    assert rates == pytest.approx([3e-4 * each for each in (1.5**2, 1, 1.5**2, *[1.5] * 4, *proportional_and_held * 2)])


@pytest.mark.slow
@pytest.mark.integration
def test_arms_with_a_shared_transformer():
    """In the study of robustness, actor and critic share a transformer in the arms that say so, and in those about sinks."""
    code = (
        "import robustness\n"
        "for arm in robustness.ARMS:\n"
        "    policy = robustness.make_model('counting', arm, 3e-4, 0, robustness.PPOExt).policy\n"
        "    if hasattr(policy, 'pi_transformer'):\n"
        "        print(arm, policy.pi_transformer is policy.vf_transformer, sep=': ')\n"
    )
    shared = dict(line.split(": ") for line in printed_lines(code) if ": " in line)
    assert len(shared) > 12
    for arm, is_shared in shared.items():
        assert (is_shared == "True") == (arm.startswith("shared") or arm.endswith("sinks")), arm


@pytest.mark.slow
@pytest.mark.integration
def test_short_runs_are_beginnings_of_longer_ones():
    """In the study of robustness, what falls during the training does not fall faster in a shorter run."""
    code = (
        "import robustness\n"
        "settings = dict(task='counting', arm='frames, falling KL', rate=3e-4)\n"
        "for timesteps in (10_000, 20_000):\n"
        "    rows = robustness.run(robustness.Job(settings, 0, timesteps))\n"
        "    print(len(rows), rows[0]['timesteps'], rows[0]['return'])\n"
    )
    (n_short, *short), (n_long, *long) = (line.split() for line in printed_lines(code)[-2:])
    assert (n_short, n_long) == ("1", "2")
    assert short == long


@pytest.mark.slow
@pytest.mark.integration
def test_when_a_falling_kl_reaches_zero():
    """In the study of robustness, what falls reaches zero after 400 thousand steps, in short runs with their end."""
    code = (
        "import robustness\n"
        "for kind in ('falling KL', 'short falling KL'):\n"
        "    settings = dict(arm=f'transformer, {kind}')\n"
        "    print(*(robustness.length_of(robustness.Job(settings, 0, steps)) for steps in (100_000, 400_000)))\n"
    )
    assert printed_lines(code)[-2:] == ["400000 400000", "100000 400000"]


def test_every_study_is_tested():
    """The studies are those that are tested, and what they share."""
    names = {"reward_scale", "bounds", "adaptive_lr", "action_distributions", "backends", "common", "memory", "memory_tasks"}
    names |= {"robustness", "held_back", "tensor_learning", "ranks", "action_masks", "asymmetric", "hybrid_actions"}
    names |= {"auxiliary_losses", "mountain_car", "environments", "recall", "popgym_easy", "memory_entry"}
    names |= {"default_screen", "default_neighbours", "longer_training"}
    assert {path.stem for path in STUDIES.glob("*.py")} == names


def test_performance_is_what_was_measured():
    """The tables of the documentation are those that `scripts/benchmark_speed.py --markdown` prints, and that of the study."""
    results = json.loads((ROOT / "docs/performance/benchmark.json").read_text())["results"]
    tables = list(runpy.run_path(str(ROOT / "scripts/benchmark_tables.py"))["tables"](results))
    text = (ROOT / "docs/performance.md").read_text()
    missing = [table for table in tables if table not in text]
    assert not missing, "paste what `python scripts/benchmark_speed.py --markdown` prints:\n\n" + "\n\n".join(missing)
    assert set(results) == {"main", "policies", "growth", "startup", "profile", "compile"}
    lines = {line for table in tables for line in table.splitlines()}
    rest = [line for line in text.splitlines() if line.startswith("|") and line not in lines]
    assert "| return, mean ± std | | SB3 | `native` | *p* |" in rest
