"""RL Zoo's commands with masks of invalid actions."""

import gymnasium as gym
import pytest
import yaml
from support import zoo
from support.masks import MaskedToy
from support.toys import VECTOR

from sb3_ppo_ext import MlpPolicy, PPOExt, make
from sb3_ppo_ext.zoo.entry_checks import CommandError

ENTRY = dict(
    env_wrapper="sb3_ppo_ext.ActionMaskWrapper",
    policy="MlpPolicy",
    action_masking=True,
    action_mask_key="action_mask",
    **dict(n_envs=2, n_steps=32, batch_size=32, n_epochs=2, n_timesteps=256, normalize=True),
)


@pytest.fixture
def masked_toy(tmp_path):
    """A toy environment that refuses invalid actions, with its entry of a YAML file."""
    gym.register("MaskedToy-v0", MaskedToy, max_episode_steps=20)
    (tmp_path / "ppo_ext.yml").write_text(yaml.dump({"MaskedToy-v0": ENTRY}))
    yield "MaskedToy-v0"
    del gym.registry["MaskedToy-v0"]


def test_policy_of_the_default(masked_toy, tmp_path):
    """The entry `default` has the policy for what it reads, which the mask is not, in the Zoo and in `make`."""
    options = {name: ENTRY[name] for name in ("env_wrapper", "action_masking", "action_mask_key", "n_envs", "n_steps")}
    model, stored = zoo.manager(env_id=masked_toy, folder=tmp_path, hyperparams=dict(options)).setup_experiment()
    made, env = make(masked_toy, device="cpu", **options)
    env.close()
    assert stored["policy"] == "MlpPolicy"
    assert type(model.policy) is type(made.policy) is MlpPolicy


@pytest.mark.integration
def test_commands(masked_toy, tmp_path, train_here, enjoy_here):
    """A training with evaluations, `enjoy`, a training that goes on, and tuning choose valid actions alone."""
    words = ["--env", masked_toy, "--conf-file", tmp_path / "ppo_ext.yml"]
    train_here(*words, "--eval-freq", "128")
    path = zoo.saved(tmp_path, masked_toy)
    assert PPOExt.load(path, device="cpu").action_masking
    assert "Mean reward" in enjoy_here(masked_toy, 100)
    train_here(*words, "-i", path)
    tuning = ["-optimize", "--n-trials", "1", "--n-startup-trials", "1", "--n-evaluations", "1", "--n-eval-envs", "1"]
    train_here(*words, *tuning, "-n", "128")


def test_masks_of_a_method_are_refused(masked_toy, tmp_path, train_here):
    """The Zoo evaluates without passing masks, so that they must be in the observation."""
    with pytest.raises(ValueError, match="ActionMaskWrapper"):
        train_here("--env", masked_toy, "--conf-file", tmp_path / "ppo_ext.yml", "-params", "action_mask_key:None")


def test_stacked_frames(masked_toy, tmp_path, train_here):
    """SB3 cannot stack masks: frames are stacked before they get one."""
    words = ["--env", masked_toy, "--conf-file", tmp_path / "ppo_ext.yml", "--eval-freq", "-1"]
    with pytest.raises(CommandError, match=r"`frame_stack=2` is not valid: .*`gymnasium\.wrappers\.Frame"):
        train_here(*words, "-params", "frame_stack:2")
    wrappers = "[{'gymnasium.wrappers.FrameStackObservation': {'stack_size': 2}}, 'sb3_ppo_ext.ActionMaskWrapper']"
    train_here(*words, "-params", f"env_wrapper:{wrappers}")
    observation_space = PPOExt.load(zoo.saved(tmp_path, masked_toy), device="cpu").observation_space
    assert observation_space["observation"].shape == (2, *VECTOR.shape)
