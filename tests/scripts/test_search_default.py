"""The random search for the default: what it samples, that it goes on where it stopped, and its statistics."""

import inspect
import json
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pandas as pd
import pytest
from stable_baselines3.common.env_util import make_vec_env
from torch import nn

from sb3_ppo_ext import make

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
sys.path.insert(0, str(SCRIPTS.parent / "benchmark" / "studies"))
import benchmark_returns  # noqa: E402
import continue_evidence  # noqa: E402
import default_screen  # noqa: E402
import default_split  # noqa: E402
import returns_suites  # noqa: E402
import search_default  # noqa: E402
import search_report  # noqa: E402
import search_space  # noqa: E402

from sb3_ppo_ext import PPOExt  # noqa: E402


def test_split():
    """No task is in both parts, each part has both kinds of actions, and no published seed is one of the search."""
    assert not default_split.DEVELOPMENT.keys() & default_split.MORE_DEVELOPMENT.keys()
    assert len(default_split.DEVELOPMENT) >= 12
    assert len(default_split.HELD_OUT) >= 20
    assert default_split.DEVELOPMENT.keys() > default_split.DISCRETE
    known = {task for suite, (budgets, _) in returns_suites.SUITES.items() if suite != "held_out" for task in budgets}
    assert not known & default_split.HELD_OUT.keys()
    assert default_split.MORE_DEVELOPMENT.keys() > default_split.MORE_DISCRETE
    for task in (*default_split.MORE_DEVELOPMENT, *default_split.HELD_OUT):
        assert returns_suites.of_package(task, returns_suites.PACKAGES)
    assert all(job.seed >= 1000 for job in search_space.sampled_jobs(20, ["CartPole-v1"]))


def test_samples_are_reproducible():
    """A number always gives the same levels, and all levels of a lever are about equally frequent where it acts."""
    assert (
        search_space.sample(7, "CartPole-v1") == search_space.sample(7, "CartPole-v1") != search_space.sample(8, "CartPole-v1")
    )
    discrete = [search_space.sample(number, "CartPole-v1") for number in range(600)]
    continuous = [search_space.sample(number, "Pendulum-v1") for number in range(600)]
    for lever, levels in search_space.LEVERS.items():
        samples = continuous if lever in search_space.CONTINUOUS_ONLY else discrete
        counts = [sum(levels_of[lever] == level for levels_of in samples) for level in levels]
        assert min(counts) > 0.75 * 600 / len(levels), lever
    assert {levels["ent_coef"] for levels in continuous} == {0.0}
    assert {levels["log_std_init"] for levels in discrete} == {0.0}


def test_first_levels():
    """The entry of the first levels is that of SB3's defaults with two environments and normalisation as in `VecNormalize`."""
    entry = search_space.entry_of(search_space.FIRST_LEVELS, "Pendulum-v1")
    assert "optimizer_kwargs=dict(betas=(0.9, 0.999), eps=1e-5)" in entry.pop("policy_kwargs")
    same = {"n_steps": 1024, "batch_size": 64, "n_epochs": 10, "gamma": 0.99, "gae_lambda": 0.95, "clip_range": 0.2}
    normalized = {"normalize_obs": True, "normalize_reward": True, "normalize_freq": "step"}
    others = {"ent_coef": 0.0, "learning_rate": 3e-4, "advantage_norm": "minibatch", "vtrace": False, "n_envs": 2}
    assert entry == {"policy": "MlpPolicy", **same, **normalized, **others}


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
    entry = search_space.entry_of({**search_space.FIRST_LEVELS, **levels}, "Pendulum-v1")
    assert {name: value for name, value in entry.items() if name.startswith(("learning_rate", "adaptive"))} == expected


def test_minatar_is_not_normalized():
    """Its observations are flags already, whatever the configuration."""
    for name in ("former default", "SB3's defaults + VecNormalize"):
        assert search_space.SearchJob(name, "MinAtar/Breakout-v1", 1000).entry()["normalize"] == "{'norm_obs': False}"
    assert "normalize" not in search_space.SearchJob("SB3's defaults", "MinAtar/Breakout-v1", 1000).entry()
    for scale, wanted in {"reward": "normalize_reward", "value": "normalize_value"}.items():
        entry = search_space.entry_of({**search_space.FIRST_LEVELS, "scale": scale}, "MinAtar/Breakout-v1")
        assert {name for name, value in entry.items() if name.startswith("normalize") and value is True} == {wanted}


def set_candidates(monkeypatch, listed):
    for module in (search_space, search_report):
        monkeypatch.setattr(module, "CANDIDATES", listed)
        monkeypatch.setattr(module, "RACERS", {kind: list(names) for kind, names in listed.items()})


@pytest.fixture
def candidates(monkeypatch):
    """Four candidates, the second of which has other levels for discrete actions"""
    listed = {
        "continuous": {name: {"gamma": 0.98} for name in "abcd"},
        "discrete": {name: {"gamma": 0.995 if name == "b" else 0.98} for name in "abcd"},
    }
    set_candidates(monkeypatch, listed)
    return list("abcd")


def test_sampled_runs():
    """They are on the tasks in turns, and each one has levels and a seed of its own."""
    jobs = search_space.sampled_jobs(9, ["CartPole-v1", "Pendulum-v1"])
    assert [job.task for job in jobs[:3]] == ["CartPole-v1", "Pendulum-v1", "CartPole-v1"]
    assert len({job.seed for job in jobs}) == len({job.digest() for job in jobs}) == 9


def test_levels_of_a_candidate(candidates):
    """A candidate may have other levels where actions are discrete."""
    gammas = {
        task: [search_space.SearchJob(name, task, 1000).entry()["gamma"] for name in candidates]
        for task in ("Pendulum-v1", "CartPole-v1")
    }
    assert gammas == {"Pendulum-v1": [0.98] * 4, "CartPole-v1": [0.98, 0.995, 0.98, 0.98]}


def test_race(candidates):
    """After the first round on all tasks, the better half goes on, for each kind of actions by itself."""
    search = search_default.Search(3, 2, ("CartPole-v1", "Pendulum-v1"))
    rows = search_default.read(Path("missing.csv"))
    jobs = []
    while (job := search.next_job(rows)) is not None:
        score = (" cabd" if job.task == "CartPole-v1" else " dbca").find(job.configuration)
        levels = "{}" if job.configuration.isdecimal() else None
        row = dict(
            configuration=job.configuration, task=job.task, seed=job.seed, digest=job.digest(), score=score, levels=levels
        )
        rows = pd.concat([rows, pd.DataFrame([row])], ignore_index=True)
        jobs.append(job)
    assert [job.configuration for job in jobs[:3]] == ["0", "1", "2"]
    assert {job.configuration for job in jobs[3:17]} == {*candidates, *search_space.REFERENCES}
    for task, better in {"CartPole-v1": {"b", "d"}, "Pendulum-v1": {"c", "a"}}.items():
        assert {job.configuration for job in jobs[17:] if job.task == task} == {*better, *search_space.REFERENCES}
    assert len(jobs) == 3 + 2 * 7 + 2 * 5
    assert search_report.racers(rows, 1, ["Pendulum-v1"]) == {"Pendulum-v1": ["a", "c"]}


def test_sampled_runs_outlive_their_levels():
    """A sampled run that is done is not repeated when other levels are sampled; a reference that has changed is."""
    search = search_default.Search(1, 1, ("CartPole-v1",))
    jobs = list(search.jobs(search_default.read(Path("missing.csv"))))
    done = [dict(configuration=job.configuration, task=job.task, seed=job.seed, digest="old") for job in jobs]
    assert search.next_job(pd.DataFrame(done)) == jobs[1]


def levels_of(name, task):
    return json.dumps(search_space.sample(int(name), task)) if name.isdecimal() else None


def rows_of(scores):
    """Rows of runs with a seed each"""
    rows = [
        dict(configuration=name, task=task, seed=seed, score=score, levels=levels_of(name, task))
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
    samples = {str(number): search_space.sample(number, "CartPole-v1") for number in range(60)}
    rows = rows_of({(number, "CartPole-v1"): [levels["betas"] == (0.9, 0.9)] for number, levels in samples.items()})
    rows = search_report.sampled(rows)
    point, (low, high), count = search_report.effects(rows, "betas")[0.9, 0.9]
    assert low == high == point > 0.5
    assert count == sum(levels["betas"] == (0.9, 0.9) for levels in samples.values())
    _, (low, high), _ = search_report.effects(rows, "normalize_freq")["rollout"]
    assert low < 0 < high
    adaptive = sum(levels["rule"] != "rate" for levels in samples.values())
    assert search_report.effects(rows, "kl")[0.02][2] < adaptive


def test_report(tmp_path, monkeypatch, candidates):
    """All tables are written, with the probabilities that a candidate is better than a reference."""
    monkeypatch.setattr(search_report, "BOOTSTRAPS", 20)
    monkeypatch.setattr("returns_report.BOOTSTRAPS", 20)
    names = [*search_space.REFERENCES, *candidates]
    scores = {(name, task): [float(place)] for place, name in enumerate(names) for task in default_split.DEVELOPMENT}
    sampled = {
        (str(job.seed - 1000), job.task): [0.0] for job in search_space.sampled_jobs(90, list(default_split.DEVELOPMENT))
    }
    search_report.report(rows_of(scores | sampled), tmp_path)
    text = (tmp_path / "search.md").read_text()
    assert "| d | 1 | 1.00 | 1.00 (1.00 to 1.00) | 1.00 (1.00 to 1.00) |" in text
    line = next(line for line in text.splitlines() if line.startswith("| ent_coef | 0.0 | 0.01 |"))
    assert line.count(" - ") == 2  # sampled for discrete actions only


def test_short_runs_want_a_folder_of_their_own(monkeypatch, capsys):
    """With fewer timesteps than the search has, another folder must be named."""
    monkeypatch.setattr(sys, "argv", ["search_default.py", "--timesteps", "100"])
    with pytest.raises(SystemExit):
        search_default.parse_arguments()
    assert "name another folder" in capsys.readouterr().err


@pytest.mark.integration
def test_search_goes_on(tmp_path, monkeypatch):
    """Only what is missing is run, and a run gives the same score alone as after another one."""
    set_candidates(monkeypatch, {"continuous": {}, "discrete": {}})
    path = tmp_path / search_default.FILE
    search = search_default.Search(1, 1, ("CartPole-v1",), 600)
    assert search_default.run_some(search, path, 2) == 2
    rows = search_default.read(path)
    assert rows["engine"].tolist() == ["native", "native"]
    again = search_default.run(search_space.SearchJob("SB3's defaults", "CartPole-v1", 1000, 600))
    assert again["score"] == pytest.approx(rows.set_index("configuration")["score"]["SB3's defaults"], rel=1e-5)
    assert search_default.run_some(search, path) == 2
    assert search_default.run_some(search, path) == 0
    assert json.loads(search_default.read(path)["levels"].dropna().item())["rule"] in search_space.LEVERS["rule"]


def test_candidates():
    """They have levels that are sampled, and no two are the same."""
    for kind, task in {"discrete": "CartPole-v1", "continuous": "Pendulum-v1"}.items():
        assert set(search_space.RACERS[kind]) <= search_space.CANDIDATES[kind].keys()
        jobs = [search_space.SearchJob(name, task, 1000) for name in search_space.CANDIDATES[kind]]
        assert len({job.digest() for job in jobs}) == len(jobs)
        for job in jobs:
            levels = job.levels()
            assert levels.keys() == search_space.LEVERS.keys()
            assert all(level in search_space.LEVERS[lever] for lever, level in levels.items())


def test_levels_are_accepted():
    """Each level of each lever makes a model."""
    for number in range(12):
        entry = search_space.entry_of(search_space.sample(number, "Pendulum-v1"), "Pendulum-v1")
        keywords = eval(entry["policy_kwargs"], {"nn": nn, "dict": dict})
        options = {name: value for name, value in entry.items() if name not in ("n_envs", "policy_kwargs")}
        PPOExt(env="Pendulum-v1", policy_kwargs=keywords, **{**options, "n_steps": 256})


def test_evidence_goes_on(tmp_path, monkeypatch):
    """What is missing is run one by one, seed by seed, and nothing twice."""
    jobs = continue_evidence.held_out()
    assert len(jobs) == len(set(jobs)) == 10 * 3 * len(default_split.HELD_OUT)
    task, done = jobs[0].task, []

    def train(job):
        done.append(job)
        columns = {"task": job.task, "arm": job.arm, "seed": job.seed, "digest": job.digest(), "timesteps": 1}
        return pd.DataFrame([{**columns, "return": 0.0, "cpu_seconds": 0.0}])

    monkeypatch.setattr(benchmark_returns, "train", train)
    some = [job for job in jobs if job.task == task][:4]
    assert [continue_evidence.run_next(some, tmp_path) for _ in range(5)] == [1, 1, 1, 1, 0]
    assert done == some
    assert [job.seed for job in done] == [500, 500, 500, 501]


def test_baselines_of_the_robots():
    """Each arm has as many seeds as it should have, and those that SB3 computes come last."""
    jobs = continue_evidence.baselines()
    assert len(jobs) == len(set(jobs)) == 6 * sum(continue_evidence.N_SEEDS.values())
    assert "computed by SB3" in jobs[-1].arm
    assert {job.arm for job in jobs[:3]} == returns_suites.BASELINES.keys()


@pytest.mark.parametrize(("env_id", "kind"), [("Pendulum-v1", "continuous"), ("CartPole-v1", "discrete")])
def test_default_is_what_was_chosen(env_id, kind):
    """`make` trains a task without an entry with what was chosen for its kind of actions on all tasks of the development."""
    levels = {name: levels[0] for name, levels in default_screen.LEVERS.items()}
    levels |= default_screen.ARMS[default_screen.CHOSEN[kind]][kind]
    env = gym.make(env_id)
    chosen = default_screen.arguments_of(levels, env.observation_space)
    model, _ = make(lambda: gym.make(env_id), device="cpu")
    expected = PPOExt("MlpPolicy", make_vec_env(env_id, levels["n_envs"]), device="cpu", **chosen)
    left_out = {"env", "policy_kwargs", "policy", "_init_setup_model", "clip_range", "rollout_buffer_class"}
    names = inspect.signature(PPOExt).parameters.keys() - left_out
    same = {name: getattr(model, name, None) == getattr(expected, name, None) for name in names}
    assert all(same.values()), same
    assert str(model.policy) == str(expected.policy)
    assert model.n_envs == expected.n_envs
    for name in ("betas", "eps", "lr"):
        assert model.policy.optimizer.defaults[name] == expected.policy.optimizer.defaults[name]


def test_named_candidates():
    """Candidates that are named run on the tasks of their kind, seed after seed, and nothing else does."""
    search = search_default.Search(tasks=("Pendulum-v1", "CartPole-v1"), n_rounds=2, candidates=("1024, colored 1", "KL"))
    jobs = [(job.configuration, job.task, job.seed) for job in search.jobs(search_default.read(Path("none")))]
    expected = [("1024, colored 1", "Pendulum-v1"), ("KL", "CartPole-v1")]
    assert jobs == [(*each, 1000 + number) for number in range(2) for each in expected]
