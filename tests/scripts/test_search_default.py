"""The random search for the default: what it samples, that it goes on where it stopped, and its statistics."""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from torch import nn

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
import continue_evidence  # noqa: E402
import default_split  # noqa: E402
import returns_suites  # noqa: E402
import search_default  # noqa: E402
import search_report  # noqa: E402
import search_space  # noqa: E402

from sb3_ppo_ext import PPOExt  # noqa: E402


def test_split():
    """No task is in both parts, each part has both kinds of actions, and no published seed is one of the search."""
    assert not default_split.DEVELOPMENT.keys() & default_split.HELD_OUT.keys()
    assert len(default_split.DEVELOPMENT) >= 12
    assert len(default_split.HELD_OUT) >= 20
    assert default_split.DEVELOPMENT.keys() > default_split.DISCRETE
    known = {task for suite, (budgets, _) in returns_suites.SUITES.items() if suite != "held_out" for task in budgets}
    assert not known & default_split.HELD_OUT.keys()
    for task in default_split.HELD_OUT:
        assert returns_suites.of_package(task, returns_suites.PACKAGES)
    assert all(job.seed >= 1000 for job in search_space.schedule(20, ["CartPole-v1"]))


def test_samples_are_reproducible():
    """A number always gives the same configuration, and all levels of a lever are about equally frequent."""
    assert search_space.sample(7) == search_space.sample(7) != search_space.sample(8)
    samples = [search_space.sample(number) for number in range(600)]
    for lever, levels in search_space.LEVERS.items():
        counts = [sum(levels_of[lever] == level for levels_of in samples) for level in levels]
        assert min(counts) > 0.75 * 600 / len(levels), lever


def test_first_levels():
    """The entry of the first levels is that of SB3's defaults with two environments and `VecNormalize`."""
    entry = search_space.entry_of({lever: levels[0] for lever, levels in search_space.LEVERS.items()})
    assert entry.pop("normalize") == "dict(norm_obs=True, norm_reward=True)"
    assert "optimizer_kwargs=dict(betas=(0.9, 0.999), eps=1e-5)" in entry.pop("policy_kwargs")
    same = {"n_steps": 1024, "batch_size": 64, "n_epochs": 10, "gamma": 0.99, "gae_lambda": 0.95, "clip_range": 0.2}
    others = {"ent_coef": 0.0, "learning_rate": 3e-4, "normalize_value": False, "vtrace": False, "n_envs": 2}
    assert entry == {"policy": "MlpPolicy", **same, **others}


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        ({"rule": "rate", "decay": "lin", "rate": 1e-3}, {"learning_rate": "lin_0.001"}),
        (
            {"rule": "proportional", "decay": "hold", "rate": 3e-4, "kl": 0.02},
            {"learning_rate": 3e-4, "adaptive_lr_kl": "hold_0.02", "adaptive_lr_rule": "proportional"},
        ),
    ],
)
def test_what_decays(levels, expected):
    """The learning rate decays, or the KL divergence that it follows."""
    first = {lever: others[0] for lever, others in search_space.LEVERS.items()}
    entry = search_space.entry_of({**first, **levels})
    assert {name: value for name, value in entry.items() if name.startswith(("learning_rate", "adaptive"))} == expected


def test_minatar_is_not_normalized():
    """Its observations are flags already, whatever the configuration."""
    for name in ("default", "SB3's defaults + VecNormalize"):
        assert search_space.SearchJob(name, "MinAtar/Breakout-v1", 1000).entry()["normalize"] == "{'norm_obs': False}"
    assert "normalize" not in search_space.SearchJob("SB3's defaults", "MinAtar/Breakout-v1", 1000).entry()


def test_schedule():
    """The references come first, each sampled configuration has a seed of its own, and no run comes twice."""
    jobs = search_space.schedule(9, ["CartPole-v1", "Pendulum-v1"])
    assert [job.configuration for job in jobs[:3]] == list(search_space.REFERENCES)
    assert len(jobs) == len({search_default.key(job) for job in jobs}) == 2 * (3 + 9 + 2 * 3)
    seeds = {job.configuration: job.seed for job in jobs if job.configuration not in search_space.REFERENCES}
    assert len(set(seeds.values())) == len(seeds) == 9


def rows_of(scores):
    """Rows of runs with a seed each"""
    rows = [
        dict(configuration=name, task=task, seed=seed, score=score, cpu_seconds=1.0)
        for (name, task), values in scores.items()
        for seed, score in enumerate(values)
    ]
    return pd.DataFrame(rows)


def test_ranks():
    """A rank is the share of the other runs that a run beats; numbers that are not finite are the worst."""
    rows = rows_of({("a", "x"): [1.0], ("b", "x"): [3.0], ("c", "x"): [np.nan], ("d", "x"): [3.0]})
    ranks = search_report.ranked(rows).set_index("configuration")["rank"]
    assert ranks.to_dict() == pytest.approx({"a": 1 / 3, "b": 2.5 / 3, "c": 0.0, "d": 2.5 / 3})


def test_configurations_that_lack_a_task_are_left_out():
    """A mean over fewer tasks would be of other tasks."""
    rows = search_report.ranked(rows_of({("0", "x"): [1.0], ("0", "y"): [2.0], ("1", "x"): [9.0]}))
    assert search_report.ranks_of(rows, {"x", "y"}).index.tolist() == ["0"]


def test_effect_of_a_lever(monkeypatch):
    """A lever that decides the rank has its whole effect, and one that does not has an interval around 0."""
    monkeypatch.setattr(search_report, "BOOTSTRAPS", 200)
    numbers = [str(number) for number in range(60)]
    ranks = pd.Series({number: float(search_space.sample(int(number))["ent_coef"] == 0.01) for number in numbers})
    point, (low, high), count = search_report.effects(ranks, "ent_coef")[0.01]
    assert (point, low, high) == (1.0, 1.0, 1.0)
    assert count == ranks.sum()
    _, (low, high), _ = search_report.effects(ranks, "batch_size")[256]
    assert low < 0 < high
    adaptive = sum(search_space.sample(int(number))["rule"] != "rate" for number in numbers)
    assert search_report.effects(ranks, "kl")[0.02][2] < adaptive


def test_report(tmp_path, monkeypatch):
    """All tables are written, with the probabilities that a configuration is better than a reference."""
    monkeypatch.setattr(search_report, "BOOTSTRAPS", 20)
    monkeypatch.setattr("returns_report.BOOTSTRAPS", 20)
    names = [*search_space.REFERENCES, *map(str, range(8))]
    scores = {(name, task): [float(place)] for place, name in enumerate(names) for task in default_split.DEVELOPMENT}
    search_report.report(rows_of(scores), tmp_path)
    text = (tmp_path / "search.md").read_text()
    assert "| 7 | 1 | 1.00 | 1.00 (1.00 to 1.00) | 1.00 (1.00 to 1.00) |" in text
    assert text.count("| ent_coef | 0.0 | 0.01 |") == 1


def test_short_runs_want_a_folder_of_their_own(monkeypatch, capsys):
    """With fewer timesteps than the search has, another folder must be named."""
    monkeypatch.setattr(sys, "argv", ["search_default.py", "--timesteps", "100"])
    with pytest.raises(SystemExit):
        search_default.parse_arguments()
    assert "name another folder" in capsys.readouterr().err


@pytest.mark.integration
def test_search_goes_on(tmp_path, capsys):
    """Only what is missing is run, and a run gives the same score alone as after another one."""
    path = tmp_path / search_default.FILE
    jobs = [search_space.SearchJob(name, "CartPole-v1", 1000, 600) for name in ("default", "3")]
    assert search_default.run_some(jobs, path) == 2
    rows = search_default.read(path)
    assert rows["engine"].tolist() == ["native", "native"]
    assert search_default.run_some(jobs, path) == 0
    again = search_default.run(jobs[1])
    assert again["score"] == pytest.approx(rows.set_index("configuration")["score"]["3"], rel=1e-5)
    search_default.write(path, rows.assign(digest="old"))
    assert search_default.run_some(jobs, path, 1) == 1
    assert sorted(search_default.read(path)["digest"]) == sorted([jobs[0].digest(), "old"])


def test_levels_are_accepted():
    """Each level of each lever makes a model."""
    for number in range(12):
        entry = search_space.entry_of(search_space.sample(number))
        keywords = eval(entry["policy_kwargs"], {"nn": nn, "dict": dict})
        options = {name: value for name, value in entry.items() if name not in ("n_envs", "normalize", "policy_kwargs")}
        PPOExt(env="Pendulum-v1", policy_kwargs=keywords, **{**options, "n_steps": 256})


def test_baselines_of_the_robots():
    """Each arm has as many seeds as it should have, and those that SB3 computes come last."""
    jobs = continue_evidence.baselines()
    assert len(jobs) == len(set(jobs)) == 6 * sum(continue_evidence.N_SEEDS.values())
    assert "computed by SB3" in jobs[-1].arm
    assert {job.arm for job in jobs[:3]} == returns_suites.BASELINES.keys()
