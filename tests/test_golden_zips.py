"""Zips of earlier versions load, predict what they predicted, and train on."""

import base64
import json
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import sb3_ppo_ext
from sb3_ppo_ext import MlpTransformerPolicy, PPOExt
from sb3_ppo_ext.common.saved_models import read_model, read_renamed

GOLDEN = Path(__file__).parent / "data" / "golden"
# Those whose names begin with "packaged" name classes by the package, and not by modules that are gone.
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())


@pytest.mark.parametrize("name", EXPECTED)
def test_golden_zip(name):
    """Zips that name classes by modules that are gone, and a backend by its earlier name, load, predict and train on."""
    expected = EXPECTED[name]
    modules = set(sys.modules)
    model = PPOExt.load(GOLDEN / name, env=gym.make(expected["env"]), device="cpu")
    assert not {module for module in set(sys.modules) - modules if module.startswith("sb3_ppo_ext")}

    observation = np.linspace(-1, 1, model.observation_space.shape[0], dtype=np.float32)
    action, _ = model.predict(observation, deterministic=True)
    np.testing.assert_allclose(action, expected["action"], rtol=1e-6)
    assert model.num_timesteps == expected["num_timesteps"]
    assert model.lr_schedule(0.5) == pytest.approx(expected["learning_rate"], rel=1e-12)

    n_updates = model._n_updates
    model.learn(32, reset_num_timesteps=False)
    assert model.num_timesteps == expected["num_timesteps"] + 32
    assert model._n_updates > n_updates


@pytest.mark.parametrize("name", EXPECTED)
def test_saved_again(name, tmp_path):
    """A zip that is saved again names no module of ours but the package itself, and loads with the same numbers."""
    model = PPOExt.load(GOLDEN / name, device="cpu")
    model.save(tmp_path / "model")
    assert read_renamed(read_model(tmp_path / "model").data) == {}
    observation = np.linspace(-1, 1, model.observation_space.shape[0], dtype=np.float32)
    again = PPOExt.load(tmp_path / "model", device="cpu")
    actions = [each.predict(observation, deterministic=True)[0] for each in (again, model)]
    np.testing.assert_equal(*actions)


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}], ids=str)
def test_older_transformer(options):
    """A transformer from before attention sinks and factors gets some that change nothing, and goes on with its optimiser."""
    saved = read_model(GOLDEN / "transformer").states("cpu")["policy.optimizer"]["state"]
    model = PPOExt.load(GOLDEN / "transformer", device="cpu", **options)
    parameters = dict(model.policy.named_parameters())
    for part, expected in (("sink", -100), ("factors", 0)):
        added = {name for name in parameters if part in name}
        assert added
        for name in added:
            np.testing.assert_array_equal(parameters.pop(name).detach(), expected)
    for state, parameter in zip(saved.values(), parameters.values(), strict=True):
        np.testing.assert_array_equal(model.policy.optimizer.state[parameter]["exp_avg"], state["exp_avg"])


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("name", ["transformer", "packaged_transformer"])
def test_shared_transformer(name, tmp_path):
    """Where actor and critic shared a transformer by default, they go on sharing it, also with `policy_kwargs` given."""
    saved = PPOExt.load(GOLDEN / name, device="cpu").policy_kwargs
    assert saved.pop("share_features_extractor")
    for given in ({}, dict(policy_kwargs=saved), dict(custom_objects=dict(policy_kwargs=saved))):
        model = PPOExt.load(GOLDEN / name, env=gym.make(EXPECTED[name]["env"]), device="cpu", **given).learn(32)
        assert model.policy.pi_transformer is model.policy.vf_transformer
        model.save(tmp_path / "model")
        again = PPOExt.load(tmp_path / "model", device="cpu")
        assert again.policy.pi_transformer is again.policy.vf_transformer


class AlwaysShared(MlpTransformerPolicy):
    """A policy whose constructor decides that actor and critic share a transformer."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, share_features_extractor=True, **kwargs)


def test_own_policy_with_a_shared_transformer(tmp_path):
    """What the constructor of a policy decides is not also given to it as a keyword."""
    model = PPOExt(AlwaysShared, "CartPole-v1", n_steps=16, batch_size=16, device="cpu").learn(16)
    model.save(tmp_path / "model")
    loaded = PPOExt.load(tmp_path / "model", device="cpu")
    assert loaded.policy_kwargs == {}
    assert loaded.policy.pi_transformer is loaded.policy.vf_transformer


def test_separate_transformers_with_equal_parameters(tmp_path):
    """What a zip does not say is not guessed from the numbers: separate transformers may have the same."""
    model = PPOExt("MlpTransformerPolicy", "CartPole-v1", n_steps=16, batch_size=16, device="cpu")
    model.policy.vf_transformer.load_state_dict(model.policy.pi_transformer.state_dict())
    model.save(tmp_path / "model")
    loaded = PPOExt.load(tmp_path / "model", device="cpu")
    assert loaded.policy.pi_transformer is not loaded.policy.vf_transformer
    assert loaded.policy_kwargs == {}


def test_some_parameters_and_the_state_of_the_optimizer():
    """Parameters of another part of a transformer policy do not make the state of the optimiser one from before sinks."""
    model = PPOExt.load(GOLDEN / "transformer", env=gym.make(EXPECTED["transformer"]["env"]), device="cpu").learn(32)
    given = model.get_parameters()
    other = PPOExt.load(GOLDEN / "transformer", device="cpu")
    part = {name: value for name, value in given["policy"].items() if name.startswith("value_net")}
    other.set_parameters({"policy": part, "policy.optimizer": given["policy.optimizer"]}, exact_match=False)
    states = [each.policy.optimizer.state_dict()["state"] for each in (other, model)]
    assert states[0].keys() == states[1].keys()
    for one, expected in zip(states[0].values(), states[1].values(), strict=True):
        np.testing.assert_array_equal(one["exp_avg"], expected["exp_avg"])


def test_old_name_of_the_backend():
    """The earlier name of a backend becomes the present one."""
    assert PPOExt.load(GOLDEN / "gaussian", device="cpu").backend == "fused"


def test_what_the_user_gives_wins():
    """What the user gives to `load` wins over the zip, also where the zip is repaired."""
    custom_objects = {"backend": "eager", "lr_schedule": lambda _: 0.25}
    model = PPOExt.load(GOLDEN / "gaussian", device="cpu", custom_objects=custom_objects)
    assert model.backend == "eager"
    model = PPOExt.load(GOLDEN / "gaussian", device="cpu", backend="auto")
    assert model.backend == "auto"
    policy_kwargs = {"net_arch": [4], "features_extractor_class": sb3_ppo_ext.TransformerExtractor}
    policy_kwargs["features_extractor_kwargs"] = {"d_model": 4, "n_heads": 1, "n_frames": 2}
    model = PPOExt.load(GOLDEN / "extractor", device="cpu", custom_objects={"policy_kwargs": policy_kwargs})
    assert model.policy_kwargs is policy_kwargs


def test_custom_objects_that_are_none():
    """Custom objects that are no dictionary are refused as by SB3."""
    with pytest.raises(ValueError, match="custom_objects argument must be a dict"):
        PPOExt.load(GOLDEN / "gaussian", device="cpu", custom_objects=["backend"])


def test_a_class_that_is_gone():
    """A class that is gone is left to SB3, which names it, or takes what the user gives instead."""
    pickled = base64.b64encode(b"csb3_ppo_ext.schedules\nNothing\n.").decode()
    assert read_renamed({"clip_range": {":serialized:": pickled}}) == {}
