"""Zips of PPOExt that SB3's own algorithms load: they act as before, or the error says to use PPOExt."""

import pickle

import numpy as np
import pytest
from gymnasium import spaces
from sb3_contrib import MaskablePPO
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.save_util import load_from_zip_file
from support.toys import VECTOR, Samples
from support.zips import Zip, parts

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.common.saved_models import read_model


class Toy(Samples):
    """Masks none of four choices."""

    def action_masks(self):
        return np.ones(4, bool)


BOX = spaces.Box(-1, 1, (2,), np.float32)
DISCRETE = spaces.Discrete(4)
HYBRID = spaces.Dict(gear=spaces.Discrete(3), force=spaces.Box(-1, 1, (2,), np.float32))
MASKED = spaces.Dict(seen=VECTOR, action_mask=spaces.MultiBinary(4))

LOADED = {
    "defaults": dict(),
    "gSDE": dict(use_sde=True),
    "schedules": dict(learning_rate="lin_1e-3", clip_range="lin_0.2", ent_coef="lin_0.01", lr_decay="constant"),
    "fixed coefficient": dict(kl_coef=1.0),
    "mean_tanh": dict(policy_kwargs=dict(mean_tanh=True)),
    "transformer": dict(policy="MlpTransformerPolicy"),
    "LSTM": dict(policy="MlpLstmPolicy"),
}
REFUSED = {
    "action_dist='beta'": dict(action_dist="beta"),
    "action_dist='squashed_gaussian'": dict(action_dist="squashed_gaussian"),
    "advantage_norm='ema'": dict(advantage_norm="ema"),
    "kl_target=0.01": dict(kl_coef=1.0, kl_target=0.01),
    "adaptive_lr_kl=0.01": dict(adaptive_lr_kl=0.01),
    "amp_dtype='float16'": dict(amp_dtype="float16"),
    "critic_learning_rate=0.1": dict(critic_learning_rate=0.1),
    "optimizer='sgd'": dict(optimizer="sgd"),
    "optimizer='adamw'": dict(optimizer="adamw"),
    "optimizer='sgd'` ": dict(env=Toy(VECTOR, DISCRETE), optimizer="sgd"),
    "weight_decay=0.1": dict(weight_decay=0.1),
    "weight_decay=0.1` ": dict(env=Toy(VECTOR, DISCRETE), weight_decay=0.1),
    "action_masking=True": dict(env=Toy(VECTOR, DISCRETE), action_masking=True),
    "action_masking=True` ": dict(
        env=Toy(MASKED, DISCRETE), policy="MultiInputPolicy", action_masking=True, action_mask_key="action_mask"
    ),
    "action_space=Dict": dict(env=Toy(VECTOR, HYBRID)),
}


def make(policy="MlpPolicy", env=None, **options):
    return PPOExt(policy, env or Toy(VECTOR, BOX), n_steps=16, batch_size=8, n_epochs=1, device="cpu", seed=0, **options)


@pytest.mark.parametrize("name", LOADED)
def test_what_ppo_can_load(name):
    """PPO loads it, and acts as the model does."""
    model = make(**LOADED[name])
    loaded = Zip(model).load(PPO, device="cpu")
    observation = model.observation_space.sample()
    actions = [each.predict(observation, deterministic=True)[0] for each in (model, loaded)]
    assert np.array_equal(*actions)


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize(
    ("algorithm", "name"), [*((PPO, name) for name in REFUSED), (A2C, "optimizer='sgd'"), (MaskablePPO, "action_masking=True")]
)
def test_what_other_algorithms_cannot_load(algorithm, name):
    """Their error names the options, and what to load the model with; PPOExt loads it, also without unpickling."""
    model = make(**REFUSED[name])
    file = Zip(model).open()
    with pytest.raises(ValueError, match=f"saved by PPOExt with .*{name.strip()}.* load it with `sb3_ppo_ext.PPOExt.load`"):
        algorithm.load(file, device="cpu")
    observation = model.observation_space.sample()
    expected, _ = model.predict(observation, deterministic=True)
    for trusted in (True, False):
        file.seek(0)
        loaded = PPOExt.load(file, device="cpu", trusted=trusted)
        assert not hasattr(loaded, "_load_with_PPOExt")
        assert str(loaded.predict(observation, deterministic=True)[0]) == str(expected)
    again = Zip(loaded).open()
    with pytest.raises(ValueError, match="saved by PPOExt with"):
        PPO.load(again, device="cpu")


def test_several_options_are_named():
    """All of them are."""
    with pytest.raises(
        ValueError, match="with `advantage_norm='ema'` and `action_dist='beta'`, which no other algorithm knows"
    ):
        Zip(make(action_dist="beta", advantage_norm="ema")).load(PPO)


def test_parameters_can_be_read():
    """SB3's functions that read the parameters alone go on working, and models can be copied and pickled."""
    model = make(action_dist="beta", advantage_norm="ema")
    _, parameters, _ = load_from_zip_file(Zip(model).open(), load_data=False)
    assert parameters.keys() == model.get_parameters().keys()
    assert pickle.loads(pickle.dumps(model.policy)).action_dist_name == "beta"
    data = read_model(Zip(model).open()).data
    assert "_load_with_PPOExt" not in data


def test_without_such_options_nothing_is_added():
    """The zip has the attributes of SB3's alone; once an option is off again, PPO loads the next zip."""
    model = make(advantage_norm="ema")
    assert b"_load_with_PPOExt" in parts(Zip(model).content)["data"]
    model.advantage_norm = "minibatch"
    model.learn(16)
    assert b"_load_with_PPOExt" not in parts(Zip(model).content)["data"]
    Zip(model).load(PPO, device="cpu")
