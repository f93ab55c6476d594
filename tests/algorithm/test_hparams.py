"""The hyperparameters of a model in TensorBoard and in Weights & Biases, schedules included."""

import json
import sys
from types import ModuleType

import pytest
from rl_zoo3.utils import SimpleLinearSchedule
from stable_baselines3.common.logger import configure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from sb3_ppo_ext import HParamCallback, PPOExt, hyperparameters
from sb3_ppo_ext.options import ALL_OPTIONS


def make(**options):
    return PPOExt("MlpPolicy", "CartPole-v1", n_steps=32, batch_size=32, n_epochs=1, device="cpu", seed=0, **options)


def shown(folder):
    """Hyperparameters in the event files of a folder."""
    [path] = [path.parent for path in folder.rglob("events*")]
    events = EventAccumulator(str(path)).Reload()
    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    values = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in values.items()}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3e-4, 3e-4),
        ("lin_0.001", "lin_0.001"),
        ("hold_0.001", "hold_0.001"),
        (SimpleLinearSchedule(2.3e-4), "lin_0.00023"),
    ],
    ids=str,
)
def test_schedules(value, expected):
    """A schedule is what it is in a YAML file, whoever has made it."""
    found = hyperparameters(make(learning_rate=value, clip_range="lin_0.2", ent_coef="lin_0.01"))
    assert (found["learning_rate"], found["clip_range"], found["ent_coef"]) == (expected, "lin_0.2", "lin_0.01")


def test_all_options():
    """Each option is there, as a number, a string or None; others than these are described."""
    model = make(policy_kwargs=dict(net_arch=[8]), clip_range_vf=None, critic_learning_rate=lambda progress: 1e-3)
    found = hyperparameters(model)
    assert found.keys() == ALL_OPTIONS.keys() | {"algorithm", "policy", "policy_kwargs", "n_envs"}
    assert json.loads(json.dumps(found)) == found
    assert (found["algorithm"], found["policy"], found["n_envs"]) == ("PPOExt", "ActorCriticPolicy", 1)
    assert (found["policy_kwargs"], found["clip_range_vf"], found["n_steps"]) == ("{'net_arch': [8]}", None, 32)
    assert found["adaptive_lr_bounds"] == "(1e-05, 0.01)"
    assert "lambda" in found["critic_learning_rate"]


def test_in_tensorboard(tmp_path, capsys):
    """TensorBoard has them, with the metrics; other outputs of the logger go on working."""
    model = make(learning_rate="lin_0.001", verbose=1)
    model.set_logger(configure(str(tmp_path), ["tensorboard", "csv", "json", "log", "stdout"]))
    model.learn(64, callback=HParamCallback())
    found = shown(tmp_path)
    assert (found["learning_rate"], found["gamma"], found["clip_range_vf"]) == ("lin_0.001", 0.99, "None")
    assert "hparams" not in (tmp_path / "progress.csv").read_text()
    assert "hparams" not in capsys.readouterr().out


def test_in_tensorboard_through_the_zoo(tmp_path, train_here):
    """The callback is named in an entry or on the command line; the entry of CartPole has linear schedules."""
    callback = "callback:'sb3_ppo_ext.HParamCallback'"
    train_here("--env", "CartPole-v1", "-n", 256, "-tb", "tb", "-params", callback)
    found = shown(tmp_path / "tb")
    assert (found["learning_rate"], found["clip_range"], found["n_envs"]) == ("lin_0.001", "lin_0.2", 8)


class Config(dict):
    """Takes what Weights & Biases would: what has a form in JSON."""

    def setdefaults(self, values):
        self.update({name: json.loads(json.dumps(value)) for name, value in values.items() if name not in self})


def test_weights_and_biases(tmp_path, train_here, monkeypatch):
    """With `--track`, the hyperparameters as they are in the entry reach Weights & Biases."""
    runs = []

    class Run:
        def __init__(self, config, sync_tensorboard, **others):
            self.config = Config(config)
            runs.append(self)

    wandb = ModuleType("wandb")
    wandb.init = Run
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    train_here("--env", "CartPole-v1", "-n", 256, "--track")
    saved = runs[0].config["saved_hyperparams"]
    assert (saved["learning_rate"], saved["clip_range"], saved["policy"]) == ("lin_0.001", "lin_0.2", "MlpPolicy")
    assert list((tmp_path / "runs").rglob("events*"))
