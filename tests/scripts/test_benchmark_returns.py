"""The benchmark of returns: what it runs, that it goes on where it stopped, and its statistics."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
import benchmark_returns  # noqa: E402
import returns_report  # noqa: E402
import returns_suites  # noqa: E402


def runs_of(scores):
    """Rows of runs with two evaluations: the score minus one, then the score plus one."""
    rows = [
        dict(task=task, arm=arm, seed=seed, timesteps=timesteps, seconds=seconds) | {"return": score + offset}
        for (task, arm), values in scores.items()
        for seed, score in enumerate(values)
        for timesteps, offset in ((0, 100.0), (500, -1.0), (1000, 1.0))
        for seconds in [2.0 if arm == "ours" else 6.0]
    ]
    return pd.DataFrame(rows)


def test_table_of_a_task():
    """The probability of improvement is that computed by hand: of nine pairs six are better and two are equal."""
    runs = runs_of({("task", "theirs"): [1.0, 2.0, 3.0], ("task", "ours"): [2.0, 3.0, 4.0]})
    [line] = returns_report.task_lines(runs, ["task"], "theirs", "ours", {"task": 4.0})
    assert line[:4] == ["task", "1k", "2.0 ± 1.0 (3)", "3.0 ± 1.0 (3)"]
    assert float(line[4]) == pytest.approx((6 + 1) / 9, abs=0.005)
    assert line[6:] == ["4.0", "3.0"]


@pytest.mark.parametrize(("n_seeds", "text"), [(3, "0.100"), (10, "< 0.001")])
def test_p_value(n_seeds, text):
    """With `n_seeds` that are all better, the p-value is twice the share of that one order among all."""
    values = np.arange(n_seeds)
    runs = runs_of({("task", "theirs"): values, ("task", "ours"): values + n_seeds})
    [line] = returns_report.task_lines(runs, ["task"], "theirs", "ours", {})
    assert line[4:6] == ["1.00", text]


@pytest.fixture(autouse=True)
def few_bootstraps(monkeypatch):
    monkeypatch.setattr(returns_report, "BOOTSTRAPS", 200)


def test_aggregates():
    """With all scores of one arm above all of the other, probability and interval are 1."""
    low, high = [0.0, 0.1, 0.2, 0.3, 0.4], [0.6, 0.7, 0.8, 0.9, 1.0]
    scores = {(task, arm): values for task in "ab" for arm, values in (("theirs", low), ("ours", high))}
    lines = dict(returns_report.aggregate_lines(runs_of(scores), ["a", "b"], "theirs", "ours"))
    assert lines["probability of improvement"] == "1.00 (1.00 to 1.00)"
    assert float(lines["IQM, ours"].split()[0]) == pytest.approx(0.8, abs=0.01)
    assert float(lines["IQM, theirs"].split()[0]) == pytest.approx(0.2, abs=0.01)


def test_intervals_are_reproducible():
    """The bootstrap gives the same interval each time."""
    scores = np.random.default_rng(0).normal(size=(5, 3))
    first, second = (returns_report.intervals_of({"arm": scores}, lambda values: np.array([values.mean()])) for _ in range(2))
    assert np.array_equal(first[1]["arm"], second[1]["arm"])
    assert first[1]["arm"][0] < first[1]["arm"][1]


def test_improvement_is_that_of_rliable():
    """The probability of improvement and its interval are rliable's."""
    from rliable import metrics

    rng = np.random.default_rng(0)
    ours, theirs = rng.normal(0.3, 1.0, (2, 5, 3))
    pair = {"pair": (ours, theirs)}
    points, intervals = returns_report.intervals_of(pair, metrics.probability_of_improvement)
    point, interval = returns_report.mean_improvement(ours.T, theirs.T)
    assert point == pytest.approx(float(np.ravel(points["pair"])[0]))
    assert interval == pytest.approx(np.ravel(intervals["pair"]), abs=0.08)


def test_aggregates_of_tasks_with_more_seeds():
    """The interquartile mean is of the first seeds, as many as all tasks have; the probability of improvement of all seeds."""
    scores = {("a", "theirs"): [0.0, 1.0], ("a", "ours"): [2.0, 3.0], ("b", "theirs"): [0.0, 1.0], ("b", "ours"): [2.0, 3.0]}
    more = {**scores, ("b", "ours"): [2.0, 3.0, -9.0]}
    results = [returns_report.aggregate_lines(runs_of(these), ["a", "b"], "theirs", "ours") for these in (scores, more)]
    one, other = map(dict, results)
    assert one["IQM, ours"] == other["IQM, ours"]
    assert one["probability of improvement"].startswith("1.00 ")
    assert other["probability of improvement"].startswith("0.83 ")  # (1 + 2/3) / 2


def test_runs_computed_by_sb3(tmp_path):
    """Their scores and times stand beside the range of the baseline's, and change nothing else in the tables."""
    scores = {("a", "theirs"): [20.0, -3.0, 40.0], ("a", "ours"): [5.0, 6.0], ("b", "theirs"): [1.0], ("b", "ours"): [1.0]}
    returns_report.report("suite", runs_of(scores), ["theirs", "ours"], tmp_path)
    before = (tmp_path / "suite.md").read_text()
    by_sb3 = {("a", "theirs, computed by SB3"): [31.4, -2.5]}
    returns_report.report("suite", runs_of(scores | by_sb3), ["theirs", "ours"], tmp_path)
    text = (tmp_path / "suite.md").read_text()
    assert text.startswith(before.rstrip())
    assert text.endswith("| a | 31, -2.5 | -3.0 to 40 | 3.0 |\n")


def test_report(tmp_path):
    """Tasks that only one arm has done are left out."""
    rng = np.random.default_rng(0)
    scores = {("a", "theirs"): rng.normal(size=3), ("a", "ours"): rng.normal(size=3), ("b", "ours"): rng.normal(size=3)}
    returns_report.report("suite", runs_of(scores), ["theirs", "ours"], tmp_path)
    text = (tmp_path / "suite.md").read_text()
    assert "| a |" in text
    assert "| b |" not in text
    assert (tmp_path / "suite.svg").stat().st_size > 5000


def jobs(suite):
    budgets, arms = returns_suites.SUITES[suite]
    return [returns_suites.Job(suite, task, arm, 0) for task in budgets for arm in arms]


@pytest.mark.parametrize("suite", returns_suites.SUITES)
def test_entries(suite):
    """Each job has hyperparameters; MuJoCo's tasks in version 5 take the Zoo's of version 4."""
    for job in jobs(suite):
        entry = job.entry()
        assert entry["n_timesteps"] == returns_suites.SUITES[suite][0][job.task], job
        if job.task == "Hopper-v5" and job.arm == "ppo":
            assert entry["batch_size"] == 32
        if job.arm == "SB3's defaults":
            assert entry.keys() == {"policy", "n_timesteps"}, job


def test_the_command_has_the_entry(tmp_path):
    """The command names the file with the hyperparameters, the seed and the interval of evaluation."""
    job = returns_suites.Job("presets", "Pendulum-v1", "ppo", 3, limit=2000)
    words = benchmark_returns.command(job, tmp_path)
    assert yaml.safe_load(Path(words[words.index("-conf") + 1]).read_text()) == {"Pendulum-v1": job.entry()}
    assert words[words.index("--seed") + 1] == "3"
    assert words[words.index("--eval-freq") + 1] == "200"
    other = returns_suites.Job("presets", "Pendulum-v1", "ppo", 3, limit=4000)
    assert job.digest() != other.digest()


@pytest.mark.parametrize("arm", ["SB3's defaults", "default"])
def test_tasks_without_an_entry(arm, tmp_path):
    """The policy fits the observations; the Zoo imports the package of the task."""
    words = benchmark_returns.command(returns_suites.Job("unseen", "PointMaze_UMazeDense-v3", arm, 3), tmp_path)
    assert words[words.index("--gym-packages") + 1] == "gymnasium_robotics"
    entry = yaml.safe_load((tmp_path / "entry.yml").read_text())["PointMaze_UMazeDense-v3"]
    expected = returns_suites.entries("ppo_ext")["default"] if arm == "default" else {}
    assert entry == {**expected, "policy": "MultiInputPolicy", "n_timesteps": 100_000}


@pytest.mark.parametrize(
    ("suite", "arm", "n_envs", "normalize"),
    [("unseen", "default", 8, "{'norm_obs': False}"), ("discrete", "ppo_ext", 64, None)],
)
def test_minatar(suite, arm, n_envs, normalize):
    """MinAtar's games have an entry. `default` is still compared on them, as the Zoo would fit it to their observations."""
    entry = returns_suites.Job(suite, "MinAtar/Freeway-v1", arm, 3).fitted_entry()
    assert (entry["n_envs"], entry.get("normalize")) == (n_envs, normalize)
    for other in ("ppo", "TRPO"):  # without an entry in the Zoo
        entry = returns_suites.Job("discrete", "MinAtar/Freeway-v1", other, 3).entry()
        assert entry == dict(policy="MlpPolicy", n_timesteps=10**6)


def test_robots(monkeypatch):
    """The Zoo's entries are computed by our engine, but the time is compared with SB3's."""
    assert returns_suites.pair("robots") == ["ppo", "ppo_ext"]
    timed = returns_suites.timed_baselines("robots")
    assert timed == {"ppo": "ppo", "SB3's defaults": "ppo", "SB3's defaults + VecNormalize": "ppo", "TRPO": "trpo"}
    for suite in returns_suites.SUITES.keys() - returns_suites.ABLATIONS:
        ours = returns_suites.pair(suite)[1]
        assert returns_suites.SUITES[suite][1][ours].algo == "ppo_ext" not in returns_suites.timed_baselines(suite).values()
    words = ["--suites", "robots", "--tasks", "Ant-v5", "--arms", "ppo", "--seeds", "2", "--first-seed", "200"]
    monkeypatch.setattr(sys, "argv", ["benchmark_returns.py", *words])
    jobs = benchmark_returns.jobs_of("robots", benchmark_returns.parse_arguments())
    assert [(job.seed, job.timesteps) for job in jobs] == [(200, 1_000_000), (201, 1_000_000)]


def test_words_of_an_arm(tmp_path, monkeypatch):
    """The words of an arm are in the command, and other words are another run."""
    digests = set()
    for words in ((), ("--trial-id", "1"), ("--trial-id", "2")):
        arm = returns_suites.Arm("ppo_ext", "ppo_ext", words=words)
        monkeypatch.setitem(returns_suites.SUITES, "suite", ({"Pendulum-v1": 100_000}, {"arm": arm}))
        job = returns_suites.Job("suite", "Pendulum-v1", "arm", 0)
        assert " ".join(words) in " ".join(benchmark_returns.command(job, tmp_path))
        digests.add(job.digest())
    assert len(digests) == 3


def test_changes_of_an_arm():
    """The changes of an arm replace values of the entry, and add keyword arguments of the policy to those of the entry."""
    entry = returns_suites.Job("ablation", "Ant-v5", "entry", 0).entry()
    assert entry["policy_kwargs"] == "dict(log_std_init=-1)"
    changed = returns_suites.Job("ablation", "Ant-v5", "SimBa, value normalisation", 0).entry()
    keywords = {"log_std_init": -1, "net_type": "simba"}
    assert changed == {**entry, "normalize_value": True, "policy_kwargs": keywords}


def test_removed_options(monkeypatch):
    """Arms whose options were removed are not run, but their rows are reported."""
    monkeypatch.setattr(sys, "argv", ["benchmark_returns.py", "--suites", "ablation"])
    jobs = benchmark_returns.jobs_of("ablation", benchmark_returns.parse_arguments())
    arms = set(returns_suites.SUITES["ablation"][1])
    assert {job.arm for job in jobs} == arms - returns_suites.REMOVED < arms
    rows = pd.read_csv(returns_suites.ABLATED.with_suffix(".csv"), dtype={"digest": str})
    assert set(benchmark_returns.current(rows, "ablation")["arm"]) >= returns_suites.REMOVED


def test_times_of_the_processor():
    """They are shown for files that have them, and rows without them do not count."""
    runs = runs_of({("task", "theirs"): [1.0, 2.0], ("task", "ours"): [2.0, 3.0]})
    assert returns_report.times_of(runs) == "seconds"
    runs["cpu_seconds"] = np.where(runs["arm"] == "ours", 1.0, 5.0)
    runs.loc[runs["seed"] == 1, "cpu_seconds"] = np.nan
    [line] = returns_report.task_lines(runs, ["task"], "theirs", "ours", {})
    assert line[-1] == "5.0"


def test_report_of_an_ablation(tmp_path):
    """Each arm is compared with the first one; an arm that lacks a task is left out."""
    returns = {
        ("A", "old"): [0, 2, 4],
        ("A", "new"): [3, 3, 3],
        ("B", "old"): [0, 0, 0],
        ("B", "new"): [1, 1, 1],
        ("A", "x"): [9],
    }
    rows = [
        {"task": task, "arm": arm, "seed": seed, "timesteps": 100, "return": value}
        for (task, arm), values in returns.items()
        for seed, value in enumerate(values)
    ]
    returns_report.report_ablation("ablation", pd.DataFrame(rows), ["old", "new", "x"], tmp_path)
    lines = (tmp_path / "ablation.md").read_text().splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| ", "| ---", "| old", "| new"]
    # Two of three runs of one task are worse than ours, and all of the other one.
    assert lines[-1].startswith("| new | 3 | 3 | 1 | ")
    assert (tmp_path / "ablation.svg").stat().st_size > 5000
    assert " | 0.83 (" in lines[-1]


def benchmark(folder, *more):
    command = [sys.executable, SCRIPTS / "benchmark_returns.py", "--suites", "memory", "--tasks", "CartPoleNoVel-v1", *more]
    command += ["--timesteps", "2048", "--seeds", "1", "--out", folder]
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True).stdout


def test_current_rows():
    """Rows of other hyperparameters are not reported."""
    job = returns_suites.Job("memory", "CartPoleNoVel-v1", "ppo_ext", 0)
    rows = pd.DataFrame([dict(task=job.task, arm=job.arm, digest=digest) for digest in (job.digest(), "old")])
    assert benchmark_returns.current(rows, "memory")["digest"].tolist() == [job.digest()]


def test_short_runs_want_a_folder_of_their_own(monkeypatch, capsys):
    """With fewer timesteps than the benchmark has, another folder must be named."""
    monkeypatch.setattr(sys, "argv", ["benchmark_returns.py", "--timesteps", "100"])
    with pytest.raises(SystemExit):
        benchmark_returns.parse_arguments()
    assert "name another folder" in capsys.readouterr().err


@pytest.mark.integration
@pytest.mark.slow
def test_times(tmp_path):
    """Both arms train as the Zoo's command would let them."""
    assert "CartPoleNoVel-v1" in benchmark(tmp_path, "--times")
    times = json.loads((tmp_path / "times.json").read_text())
    assert times["memory"]["CartPoleNoVel-v1"] > 0.5


@pytest.mark.integration
@pytest.mark.slow
def test_benchmark_goes_on(tmp_path):
    """Only what is missing is run: the other arm, then nothing, then a run whose hyperparameters have changed."""
    path = tmp_path / "memory.csv"
    assert "1 runs to do" in benchmark(tmp_path, "--arms", "ppo_ext")
    first = pd.read_csv(path)
    assert len(first) == benchmark_returns.N_EVALUATIONS
    printed = benchmark(tmp_path)
    assert "1 runs to do" in printed
    assert "probability of improvement" in printed
    both = pd.read_csv(path)
    pd.testing.assert_frame_equal(both[both["arm"] == "ppo_ext"].reset_index(drop=True), first)
    assert "0 runs to do" in benchmark(tmp_path)
    both.loc[both["arm"] == "ppo_ext", "digest"] = "old"
    both.to_csv(path, index=False)
    assert "1 runs to do" in benchmark(tmp_path)
    again = pd.read_csv(path)
    assert len(again) == len(both)
    assert "old" not in set(again["digest"])
    for name in ("memory.md", "memory.svg", "versions.json"):
        assert (tmp_path / name).exists()


@pytest.mark.integration
@pytest.mark.slow
def test_a_terminated_benchmark_ends_its_runs(tmp_path):
    """No training is left when the benchmark itself is terminated."""
    command = [sys.executable, SCRIPTS / "benchmark_returns.py", "--suites", "presets", "--tasks", "Pendulum-v1"]
    process = subprocess.Popen([*command, "--timesteps", "90000", "--processes", "1", "--out", tmp_path])
    runs = ""
    while not runs:
        assert process.poll() is None
        time.sleep(0.1)
        runs = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout
    process.terminate()
    assert process.wait(60) != 0
    assert subprocess.run(["ps", "-o", "stat=", "-p", *runs.split()], capture_output=True, text=True).stdout in ("", "Z\n")


@pytest.mark.integration
@pytest.mark.slow
def test_tuning(tmp_path):
    """Two trials run, the better one trains with two seeds beside the Zoo's entry, and then nothing is left to do."""
    command = [sys.executable, SCRIPTS / "benchmark_tuning.py", "--trials", "2", "--timesteps", "4096", "--seeds", "2"]
    command += ["--storage", tmp_path / "study.log", "--out", tmp_path / "out"]

    def run():
        return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True).stdout

    assert "4 runs to do" in run()
    trials = pd.read_csv(tmp_path / "out" / "tuning-trials.csv")
    assert len(trials) == 2
    runs = pd.read_csv(tmp_path / "out" / "tuning.csv")
    assert runs.groupby(["arm", "seed"]).size().to_dict() == {
        (arm, seed): 10 for arm in ("best trial", "ppo") for seed in (0, 1)
    }
    assert "| Pendulum-v1 |" in (tmp_path / "out" / "tuning.md").read_text()
    assert "0 runs to do" in run()
    assert len(pd.read_csv(tmp_path / "out" / "tuning-trials.csv")) == 2
