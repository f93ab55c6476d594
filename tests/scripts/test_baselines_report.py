"""The tables of all baselines: at equal steps and at equal CPU time."""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
import baselines_report  # noqa: E402
import benchmark_returns  # noqa: E402
import returns_report  # noqa: E402
import returns_suites  # noqa: E402


def curve(task, arm, seed, returns):
    """Rows of a run with an evaluation after each tenth of its steps"""
    rows = {"task": task, "arm": arm, "seed": seed, "timesteps": np.arange(1, 11) * 100}
    return pd.DataFrame({**rows, "return": returns, "seconds": 1.0})


@pytest.mark.parametrize(
    ("share", "expected"), [(1.0, 9.5), (2.0, 9.5), (0.9, 8.5), (0.55, 5.5), (0.5, 4.5), (0.15, 1.5), (0.1, 1.0), (0.01, 1.0)]
)
def test_score_after_a_share_of_the_steps(share, expected):
    """It is the mean of the evaluations before and after; before the first evaluation, that one."""
    assert baselines_report.score_after(curve("task", "arm", 0, np.arange(1.0, 11.0)), share) == expected


@pytest.mark.parametrize(("ratio", "ours", "theirs"), [(4.0, 9.5, 2.5), (0.5, 4.5, 9.5), (1.0, 9.5, 9.5)])
def test_the_slower_arm_is_cut_off(ratio, ours, theirs):
    """At equal CPU time, the arm whose steps take longer has fewer of them."""
    runs = pd.concat([curve("task", arm, 0, np.arange(1.0, 11.0)) for arm in ("ours", "theirs")])
    scores = baselines_report.at_equal_time(runs, "ours", {"task": {"theirs": ratio}})
    assert [values.tolist() for values in scores("task", "theirs")] == [[ours], [theirs]]
    assert [len(values) for values in scores("other task", "theirs")] == [0, 0]


def test_the_strongest_baseline_is_marked():
    """
    It is the one with the highest mean, and what is better than ours comes first; a baseline without runs has no line, and a
    run alone no p-value.
    """
    means = {"ours": [5, 6], "weak": [1, 2], "strong": [7, 8], "single": [4]}
    runs = pd.concat(
        curve("task", arm, seed, float(value)) for arm, values in means.items() for seed, value in enumerate(values)
    )
    arms = ["weak", "ours", "strong", "missing", "single", "strong, computed by SB3"]
    baselines = baselines_report.baselines_of(runs, arms, "ours")
    assert baselines == ["weak", "strong", "single"]
    scores = baselines_report.at_equal_steps(runs, "ours")
    lines = baselines_report.baseline_lines(["task"], "ours", baselines, scores)
    assert [line[1] for line in lines] == ["**strong**", "weak", "single"]
    assert [line[4] for line in lines] == ["0.00", "1.00", "1.00"]
    assert lines[2][5] == "-"
    summary = baselines_report.summary_lines(["task"], baselines, scores)
    assert [line[:4] for line in summary] == [["weak", "1", "0", "0"], ["strong", "1", "1", "0"], ["single", "1", "0", "0"]]


def test_tasks_on_which_both_are_best_are_left_out():
    """They are named, and do not count as ties; one run below the best return is enough to count the task."""
    best = {"EnvPool/Catch-v0": ([1.0, 1.0], [1.0, 1.0]), "CartPole-v1": ([500.0, 500.0], [500.0, 499.0])}

    def scores(task, baseline):
        return tuple(np.array(values) for values in best[task])

    ((_, n_tasks, *_),) = baselines_report.summary_lines(list(best), ["a"], scores)
    assert n_tasks == "1"
    (text,) = baselines_report.left_out(list(best), ["a"], scores)
    assert text.endswith("the best possible return: EnvPool/Catch-v0 (a).")
    assert baselines_report.left_out(["CartPole-v1"], ["a"], scores) == []


def test_interval_over_tasks():
    """With two tasks, one won and one lost, a bootstrap has all of 0, 1/2 and 1; with equal ones, there is no other result."""
    won, lost = np.array([2.0, 3.0]), np.array([0.0, 1.0])
    np.testing.assert_array_equal(returns_report.interval_over_tasks([won, lost], [lost, won]), [0, 1])
    np.testing.assert_array_equal(returns_report.interval_over_tasks([won] * 3, [lost] * 3), [1, 1])


@pytest.mark.integration
def test_parts_of_a_page():
    """Without times, there is no table at equal CPU time."""
    runs = pd.concat(curve("task", arm, 0, np.arange(10.0)) for arm in ("ours", "a", "b"))
    for ratios, n_parts in (({}, 3), ({"task": {"a": 2.0}}, 6)):
        assert len(baselines_report.baseline_parts(runs, ["task"], "ours", ["a", "b"], ratios)) == n_parts


@pytest.mark.many(one_in=5)
@pytest.mark.parametrize(
    ("suite", "task", "arm", "engine"),
    [
        ("discrete", "Acrobot-v1", "ppo", "native"),
        ("discrete", "Acrobot-v1", "ppo, computed by SB3", "sb3"),
        ("presets", "Pendulum-v1", "SB3's defaults + VecNormalize", "native"),
        ("presets", "Pendulum-v1", "SB3's defaults, computed by SB3", "sb3"),
        ("robots", "Swimmer-v5", "TRPO", "sb3_contrib"),
    ],
)
def test_the_engine_of_a_run(suite, task, arm, engine):
    """It is the one that `auto` chooses, or the package of another algorithm."""
    assert benchmark_returns.engine_of(returns_suites.Job(suite, task, arm, 0)) == engine


def test_no_runs_without_the_extension(monkeypatch):
    """Another engine must not take its place silently."""
    benchmark_returns.refuse_without_extension()
    monkeypatch.setattr(benchmark_returns.extension, "module", None)
    with pytest.raises(SystemExit, match="not built"):
        benchmark_returns.refuse_without_extension()


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("Hopper-v5", {"policy": "MlpPolicy", "normalize": True}),
        ("MinAtar/Freeway-v1", {"policy": "MlpPolicy", "normalize": "{'norm_obs': False}"}),
    ],
)
def test_vec_normalize(task, expected):
    """SB3's untouched hyperparameters, with what `default` leaves unnormalised left alone as well."""
    suite = "robots" if task == "Hopper-v5" else "unseen"
    entry = returns_suites.Job(suite, task, "SB3's defaults + VecNormalize", 0).fitted_entry()
    del entry["n_timesteps"]
    assert entry == expected


def test_trpo():
    """It has the Zoo's entry for the robots."""
    entry = returns_suites.Job("robots", "Hopper-v5", "TRPO", 0).entry()
    assert (entry["n_envs"], entry["n_steps"], entry["n_critic_updates"]) == (2, 1024, 20)


def test_held_out_tasks_are_run_only_by_name(monkeypatch):
    """They are no part of what runs without arguments, and `default` fits their observations."""
    monkeypatch.setattr(sys, "argv", ["benchmark_returns.py"])
    assert not {"candidates", "held_out"} & set(benchmark_returns.parse_arguments().suites)
    entry = returns_suites.Job("held_out", "EnvPool/ReacherEasy-v1", "default", 0).fitted_entry()
    assert entry["policy"] == "MultiInputPolicy"
