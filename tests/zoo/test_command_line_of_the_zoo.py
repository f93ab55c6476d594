"""Mistakes on RL Zoo's command line, and notices about what a run does, in one line."""

import argparse
import runpy
import sys
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from rl_zoo3 import utils
from support.zoo import manager

from sb3_ppo_ext.zoo.entry_checks import CommandError
from sb3_ppo_ext.zoo.experiment import _say_what_repeats
from sb3_ppo_ext.zoo.registration import register
from sb3_ppo_ext.zoo.run_normalization import _normalizable


@pytest.mark.parametrize("given", [dict(study_name="s"), dict(storage="study.log"), dict(study_name="s", storage="study.log")])
def test_studies_without_a_trial(given):
    """A study without `--trial-id` is refused, where the Zoo would train without it."""
    with pytest.raises(ValueError, match=r"of which trial\? Give `--trial-id`"):
        manager(**given).read_hyperparameters()


def parsed(*values):
    parser = argparse.ArgumentParser()
    parser.add_argument("-params", nargs="+", action=utils.StoreDict)
    return parser.parse_args(["-params", *values]).params


def test_strings_without_quotes(monkeypatch):
    """Words need no quotes; another value that is no Python code is named. Other algorithms have the Zoo's error."""
    register()
    assert parsed("n_steps:8", "policy:'MlpPolicy'") == {"n_steps": 8, "policy": "MlpPolicy"}
    monkeypatch.setattr(sys, "argv", ["train", "--algo", "ppo_ext"])
    words = ["n_envs:auto", "policy:MlpLstmPolicy", "env_wrapper:gymnasium.wrappers.FlattenObservation", "lr:lin_0.001"]
    values = ["auto", "MlpLstmPolicy", "gymnasium.wrappers.FlattenObservation", "lin_0.001"]
    assert list(parsed(*words).values()) == values
    # Also those that are names of Python's functions, and numbers with an exponent
    assert parsed("a:max", "b:compile", "c:lin_2.5e-4") == {"a": "max", "b": "compile", "c": "lin_2.5e-4"}
    code = {"a": True, "b": False, "c": None, "d": 3e-4, "e": "x", "f": {"g": 1}, "h": False, "i": float}
    assert parsed("a:true", "b:False", "c:None", "d:3e-4", "e:'x'", "f:dict(g=1)", "h:false", "i:float") == code
    for value in ("n_steps:8 9", "policy:Mlp-Policy", "policy:"):
        with pytest.raises(CommandError, match=r"is no Python code .*a string needs quotes"):
            parsed("n_steps:8", value)
    monkeypatch.setattr(sys, "argv", ["train", "--algo", "ppo"])
    with pytest.raises(NameError):
        parsed("policy:MlpLstmPolicy")


def test_small_images_are_normalised_as_with_ppo():
    """A small image in a dictionary is normalised, and then read as a vector; a large one is left to its network."""
    small, large = (spaces.Box(0, 255, (n, n, 3), np.uint8) for n in (8, 64))
    speed = spaces.Box(-1, 1, (2,), np.float32)
    assert _normalizable(spaces.Dict(camera=small, speed=speed)) == {"norm_obs_keys": ["camera", "speed"]}
    assert _normalizable(spaces.Dict(camera=large, speed=speed)) == {"norm_obs_keys": ["speed"]}


@pytest.mark.parametrize(
    ("kwargs", "is_said"), [({}, True), (dict(frameskip=1), True), (dict(frameskip=1, repeat_action_probability=0.0), False)]
)
def test_repeated_actions_of_ale(kwargs, is_said, monkeypatch, capsys):
    """Where ALE repeats actions as well as the wrapper, a line says so, and how to change it."""
    spec = SimpleNamespace(id="ALE/Pong-v5", entry_point="ale_py.env:AtariEnv", kwargs={})
    monkeypatch.setattr(gym, "spec", lambda env_id: spec)
    experiment = SimpleNamespace(env_name=SimpleNamespace(gym_id=spec.id), env_kwargs=kwargs)
    _say_what_repeats(experiment, {"env_wrapper": ["stable_baselines3.common.atari_wrappers.AtariWrapper"]})
    assert ("frameskip:1 repeat_action_probability:0.0" in capsys.readouterr().out) is is_said
    _say_what_repeats(experiment, {})
    assert capsys.readouterr().out == ""


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_plots_without_matplotlib(monkeypatch, capsys):
    """Without Matplotlib, `--help` works, and plots end with one line that says what to install."""
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"] or ["matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    for word, status in ("--help", 0), ("logs", 2):
        monkeypatch.setattr(sys, "argv", ["plot_run", word])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("sb3_ppo_ext.plot_run", run_name="__main__")
        assert ended.value.code == status
    assert "pip install 'sb3-ppo-ext[plot]'" in capsys.readouterr().err.splitlines()[-1]
