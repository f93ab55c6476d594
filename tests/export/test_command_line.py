"""Tests of `python -m sb3_ppo_ext.export`, and of the example that acts with its file."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.export.__main__ import main

onnxruntime = pytest.importorskip("onnxruntime")

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("export"), pytest.mark.usefixtures("quick_export")]
EXAMPLE = Path(__file__).parents[2] / "examples" / "act_with_onnx.py"


@pytest.fixture(name="run")
def make_run(tmp_path):
    """Folder of a run as RL Zoo leaves it."""
    folder = tmp_path / "ppo_ext" / "Pendulum-v1_1"
    env = VecNormalize(make_vec_env("Pendulum-v1", 2, seed=0))
    model = PPOExt("MlpPolicy", env, n_steps=16, batch_size=16, device="cpu", action_dist="beta", seed=0)
    model.save(folder / "best_model.zip")
    model.learn(64)
    model.save(folder / "Pendulum-v1.zip")
    (folder / "Pendulum-v1").mkdir()
    env.save(folder / "Pendulum-v1" / "vecnormalize.pkl")
    return folder, model


def act(path, observation):
    return onnxruntime.InferenceSession(path).run(None, {"observation": observation})[0]


def test_folder_of_a_run(run, monkeypatch, capsys):
    """The last model is exported with its statistics, or the best one; the example plays an episode with ONNX Runtime."""
    folder, model = run
    observation = np.float32([[0.5, -0.5, 3.0]])
    main([str(folder)])
    assert "vecnormalize.pkl" in capsys.readouterr().out
    expected, _ = model.predict(model.env.normalize_obs(observation), deterministic=True)
    np.testing.assert_allclose(act(folder / "policy.onnx", observation), expected, atol=1e-5)
    main([str(folder), "--load-best", "-o", str(folder / "best.onnx")])
    assert not np.allclose(act(folder / "best.onnx", observation), expected, atol=1e-5)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(folder / "policy.onnx"), "Pendulum-v1"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "return" in capsys.readouterr().out
    assert "torch" not in EXAMPLE.read_text().replace("without PyTorch", "")


@pytest.mark.slow
def test_other_names_of_a_run(run, monkeypatch):
    """The folder of a run may have any name, such as one with a UUID, or be the current one."""
    folder, _ = run
    with pytest.raises(SystemExit, match="it is not the folder of a run"):
        main([str(folder / "Pendulum-v1")])
    with pytest.raises(SystemExit, match="there is no"):
        main([str(folder.rename(folder.with_name("Pendulum-v1_1_a-uuid")))])
    folder = folder.with_name("Pendulum-v1_1_a-uuid")
    (folder / "Pendulum-v1" / "args.yml").write_text("algo: ppo_ext\n")
    monkeypatch.chdir(folder)
    main(["."])
    assert (folder / "policy.onnx").is_file()


@pytest.mark.slow
def test_zip_file_to_samples(run):
    """A zip file is exported without statistics, also with random numbers as inputs."""
    folder, _ = run
    main([str(folder / "Pendulum-v1.zip"), "--stochastic", "-o", str(folder / "samples.onnx")])
    names = [each.name for each in onnxruntime.InferenceSession(folder / "samples.onnx").get_inputs()]
    assert names == ["observation", "noise", "uniform"]


@pytest.mark.parametrize(
    ("arguments", "match"), [(["none_1"], "no none.zip"), (["Pendulum-v1_1", "-o", "policy.txt"], "policy.txt")]
)
def test_errors_are_one_line(arguments, match, run):
    """What is wrong is said in one line, without a traceback."""
    folder, _ = run
    with pytest.raises(SystemExit, match=match) as error:
        main([str(folder.parent / arguments[0]), *arguments[1:]])
    assert "\n" not in str(error.value)
