"""Trainings by several processes, as torchrun starts them."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch as th
from support.forked_ranks import run_all
from support.processes import run_apart
from support.rank_cases import BACKENDS, OPTIONS

from sb3_ppo_ext import PPOExt

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("ranks")]
SUPPORT = Path(__file__).parents[1] / "support"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
FEW = [
    *(f"normalized/{backend}/default" for backend in BACKENDS),
    *(
        "plain/native/moving averages",
        "plain/native/target_kl",
        "plain/native/priority_alpha",
        "plain/native/max_clip_fraction",
    ),
    *("plain/fused/one segment", "plain/eager/adaptive_lr_kl", "plain/eager/accumulate_grad", "plain/device/kl_coef"),
    *("plain/device/normalize_value", "normalized/device/mirror"),
    *("plain/eager/vtrace", "plain/native/uneven minibatches", "tensors/device/default"),
    *("dict/fused/different keys", "hybrid/native/further losses"),
    *("own/native/default", "own tensors/device/default", "by rollout/eager/default"),
]
ALL = [f"{env}/{backend}/{option}" for env in ("plain", "normalized") for backend in BACKENDS for option in OPTIONS]
ALL += [f"tensors/{backend}/{option}" for backend in ("device", "eager") for option in OPTIONS]
ALL = [name for name in ALL if not name.startswith("tensors") or not name.endswith("mirror")]  # other actions
ALL = [name for name in ALL if "native" not in name or not name.endswith(("mirror", "caps_temporal"))]
ALL += [f"dict/{backend}/{option}" for backend in ("eager", "fused", "device") for option in ("sgd", "different keys")]
# Muon's steps are computed in bfloat16. Together, the other options amplify rounding.
TOLERANCES = {"muon": 2e-2, "priorities with moving averages and V-trace": 2e-4}


def run(command, timeout=900, **variables):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done


def run_jobs(*jobs):
    """Run scripts by ranks that are forked, each with the number of its ranks before it; return what they print."""
    status, printed = run_apart(run_all, jobs)
    assert status == 0, printed[-9000:]
    return printed


def jobs_of(folder, n_ranks, cases, *flags):
    """Trainings by ranks, and by one process with the environments of all."""
    script = SUPPORT / "rank_cases.py"
    return (n_ranks, script, folder, *cases, *flags), (0, script, folder, *cases, "--all", n_ranks)


def assert_equal_one_process(folder, n_ranks, cases, *flags):
    run_jobs(*jobs_of(folder, n_ranks, cases, *flags))
    assert_equal_results(folder, n_ranks)


def assert_equal_results(folder, n_ranks):
    expected = json.loads((folder / f"{n_ranks}_0.json").read_text())
    ranks = [json.loads((folder / f"1_{rank}.json").read_text()) for rank in range(n_ranks)]
    for case, one in expected.items():
        tolerance = TOLERANCES.get(case.split("/")[-1], 1e-5)
        first = ranks[0][case]
        assert all(rank[case]["parameters"] == first["parameters"] for rank in ranks), case
        for name, values in one["parameters"].items():
            np.testing.assert_allclose(first["parameters"][name], values, rtol=0, atol=tolerance, err_msg=f"{case} {name}")
        assert all(rank[case]["num_timesteps"] == one["num_timesteps"] for rank in ranks)
        for rank in ranks:
            rough = max(tolerance, 1e-3)
            np.testing.assert_allclose(rank[case]["episodes"], one["episodes"], rtol=rough, atol=rough, err_msg=case)
            for values, other in zip(one["statistics"], rank[case]["statistics"], strict=True):
                np.testing.assert_allclose(other, values, rtol=1e-4, atol=1e-5, err_msg=case)
            assert rank[case]["logs"].keys() == one["logs"].keys()
            for name, value in one["logs"].items():
                within = dict(rtol=max(1e-2, 10 * tolerance), atol=1e-3, err_msg=f"{case} {name}")
                np.testing.assert_allclose(rank[case]["logs"][name], value, **within)


def test_ranks_equal_one_process(scenarios):
    """Two ranks compute what one process with the environments of both does, and log the same."""
    assert_equal_results(scenarios["folder"] / "cases", 2)


ON_DEVICE = [f"plain/device/{name}" for name in ("default", "target_kl", "kl_coef", "priority_alpha", "accumulate_grad")]
ON_DEVICE += ["plain/device/max_clip_fraction", "tensors/device/default", "normalized/device/default"]


@pytest.mark.slow
def test_updates_on_a_device_without_shared_memory(tmp_path):
    """The same on a simulated device, where decisions are made on the device, with gloo, as between machines."""
    assert_equal_one_process(tmp_path, 2, ON_DEVICE, "--device", "simulated", "--gloo")


@pytest.mark.gpu
@pytest.mark.skipif(not th.cuda.is_available(), reason="needs CUDA")
def test_ranks_on_a_gpu(tmp_path):
    """The same on CUDA, where two ranks share a GPU."""
    assert_equal_one_process(tmp_path, 2, ON_DEVICE, "--device", "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("n_ranks", [2, 4])
def test_ranks_equal_one_process_with_every_option(tmp_path, n_ranks):
    """As above, for every option on every backend, and for four ranks."""
    assert_equal_one_process(tmp_path, n_ranks, ALL)


ZOO = ["--algo", "ppo_ext", "--env", "CartPole-v1", "--device", "cpu", "--verbose", "0"]
OF_THE_ZOO = ["-n", "1024", "--eval-freq", "512", "--eval-episodes", "1"]
OF_THE_ZOO += ["-params", "n_envs:4", "n_steps:64", "n_epochs:2", "normalize:True"]
SCENARIOS = ("plain", "seeds", "off", "differences", "bad_input", "stop", "changed_weights", "memory", "zips", "error")


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory):
    """Results of the scenarios on both ranks, and their folder."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "cases").mkdir()
    zoo = (2, find_spec("rl_zoo3.train").origin, "-f", folder / "logs", *ZOO, *OF_THE_ZOO)
    printed = run_jobs((2, SUPPORT / "rank_script.py", folder, *SCENARIOS), *jobs_of(folder / "cases", 2, FEW), zoo)
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    return {name: [each[name] for each in found] for name in SCENARIOS} | {"folder": folder, "output": printed}


def test_an_ordinary_script(scenarios):
    """Both ranks have the same policy, count the steps of all environments, and run the callbacks that they should."""
    first, second = scenarios["plain"]
    assert first["weights"] == second["weights"]
    assert (first["steps"], second["steps"]) == (128, 128)
    assert (first["user"], second["user"]) == (32, 32)
    assert (first["evaluated"], first["saved"]) == (32, 32)
    assert (second["evaluated"], second["saved"]) == (0, 0)
    assert first["episodes"] == second["episodes"] > 12
    assert first["ranks"] == 1, "after the training, each rank is by itself"


def test_the_first_rank_logs(scenarios):
    """One TensorBoard folder, one table for each iteration, the evaluations and checkpoints of rank 0."""
    folder = scenarios["folder"]
    assert [path.name for path in (folder / "tb").iterdir()] == ["PPOExt_1"]
    assert len(list((folder / "tb" / "PPOExt_1").iterdir())) == 1
    assert scenarios["output"].count("iterations") == 2
    assert scenarios["output"].count("Using cpu device") == 1
    assert (folder / "best" / "best_model.zip").exists()
    assert len(list((folder / "checkpoints").iterdir())) == 2
    assert [each["verbose"] for each in scenarios["plain"]] == [1, 0]


def test_seeds(scenarios):
    """However generators and environments are seeded, each rank draws its own numbers, and all have the same policy."""
    first, second = scenarios["seeds"]
    for name, (drawn, weights, observation) in first.items():
        other_drawn, other_weights, other_observation = second[name]
        assert weights == other_weights, name
        assert drawn[0] != other_drawn[0], name
        assert drawn[1] != other_drawn[1], name
        assert observation != other_observation, name


def test_independent_models(scenarios):
    """With ``distributed="off"``, each process trains a model of its own."""
    (first, steps), (second, _) = scenarios["off"]
    assert first != second
    assert steps == 64


def test_differences_are_refused(scenarios):
    """All ranks refuse what is not the same on each of them, by its name."""
    for found in scenarios["differences"]:
        for name, message in found.items():
            assert message.startswith(f"DisagreementError: `{name}"), message
            assert "on rank 0" in message
            assert "on rank 1" in message


def test_options_that_ranks_cannot_share(scenarios):
    """They are refused when the model is created."""
    for found in scenarios["bad_input"]:
        assert "`batch_size=15` is not valid" in found["batch_size"]
        assert "multiple of 2" in found["batch_size"]
        assert "`accumulate_grad=2` is not valid" in found["accumulate_grad"]


def test_a_callback_ends_the_training(scenarios):
    """A callback of either rank ends the training of both, which can go on, with the same policy and statistics."""
    first, second = scenarios["stop"]
    for rank in ("0", "1"):
        assert first[rank] == second[rank]
        stopped, steps, *_, count, is_plain = first[rank]
        assert stopped == (16 + 5) * 2 * 2
        assert steps == stopped + 128
        assert count > stopped
        assert is_plain
    assert first["evaluation"] == second["evaluation"] == 8 * 2 * 2


def test_parameters_that_a_callback_changes(scenarios):
    """What a callback does to the policy on rank 0 alone reaches the other rank."""
    first, second = scenarios["changed_weights"]
    assert first == second


def test_history_based_policies(scenarios):
    """Transformers and recurrent policies are trained by both ranks together."""
    first, second = scenarios["memory"]
    assert first == second
    assert [steps for _, steps in first.values()] == [128] * 4


def test_saved_models(scenarios):
    """A model that rank 0 has saved is loaded by both, and trained on."""
    first, second = scenarios["zips"]
    assert first == second
    assert first[1] == 128


def test_an_error_on_one_rank(scenarios):
    """It names the environment on the rank where it happens, and the rank on the other, which does not wait for ever."""
    (of_first, weights), (of_second, other_weights) = scenarios["error"]
    assert "reward" in of_second
    assert "rank 1 has failed" in of_first
    assert weights == other_weights


def test_no_shared_memory_is_left(scenarios):
    """The files of the shared memory are deleted as soon as they are open."""
    assert not list(Path("/dev/shm").glob("sb3_ppo_ext_*"))


def test_the_zoo(scenarios):
    """All ranks train one model of the Zoo; rank 0 writes one run, with evaluations at the given numbers of steps."""
    (folder,) = (scenarios["folder"] / "logs" / "ppo_ext").iterdir()
    assert len(list(folder.glob("*.monitor.csv"))) == 4
    assert np.load(folder / "evaluations.npz")["timesteps"].tolist() == [512, 1024]
    assert PPOExt.load(folder / "CartPole-v1.zip").normalizer is not None


@pytest.mark.slow
def test_the_zoo_trains_independently(tmp_path):
    """With ``distributed: "off"`` in the YAML file, each process trains a model of its own, in a folder of its own."""
    config = tmp_path / "ppo_ext.yml"
    config.write_text('CartPole-v1: {policy: MlpPolicy, n_envs: 2, n_steps: 32, n_timesteps: 128, distributed: "off"}')
    run([*TORCHRUN, "2", "-m", "rl_zoo3.train", *ZOO, "--conf-file", str(config), "--uuid", "-f", str(tmp_path / "logs")])
    models = [PPOExt.load(path, device="cpu") for path in (tmp_path / "logs").rglob("CartPole-v1.zip")]
    assert [model.num_timesteps for model in models] == [128, 128]


@pytest.mark.slow
def test_the_zoo_does_not_tune(tmp_path):
    """``-optimize`` is refused with a remedy: ranks train one model."""
    arguments = ["-m", "rl_zoo3.train", *ZOO, "-optimize", "--n-trials", "1", "-f", str(tmp_path / "logs")]
    done = subprocess.run([*TORCHRUN, "2", *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "torchrun trains one model" in done.stderr + done.stdout
