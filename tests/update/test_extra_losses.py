"""The option `auxiliary_losses`: on every engine, with other options, from files, and what is refused."""

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from support.device_training import same_draws, tensor_env
from support.engines import assert_same_update
from support.toys import make_toys
from support.training import changed, logged, make, run
from support.zips import Zip

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.engines.native.engine import NativeEngine
from sb3_ppo_ext.engines.torch_engine import EagerEngine, FusedEngine
from sb3_ppo_ext.update.extra_losses import EXTRA_LOSSES

MIRROR = dict(obs=[0, [1, -1], [2, -1]], action=[[0, -1], 1])
LOSSES = {
    "mirror": dict(coef=0.5, **MIRROR),
    "mirror_augmentation": dict(coef=1.0, **MIRROR),
    "caps_temporal": 0.1,
    "caps_spatial": dict(coef=0.1, std=0.05),
}
OTHERS = {
    "plain": {},
    "accumulated": dict(accumulate_grad=2, batch_size=4),
    "squashed, V-trace": dict(action_dist="squashed_gaussian", vtrace=True),
    "Beta, KL control": dict(action_dist="beta", kl_coef=0.5, kl_target=0.01),
    "segments": dict(priority_alpha=0.6, priority_segment=4),
    "frozen actor": dict(max_clip_fraction=0.1, learning_rate=1e-2),
    "clipped values, SPO": dict(clip_range_vf=0.1, surrogate="spo", ent_coef=0.01),
    "discrete": dict(
        env=dict(action_space=spaces.Discrete(3)),
        auxiliary_losses=LOSSES | {name: dict(LOSSES[name], action=[0, 2, 1]) for name in ("mirror", "mirror_augmentation")},
    ),
}


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("name", OTHERS)
def test_update_of_the_fused_engine(name):
    """The fused engine makes the update of the reference, with all losses."""
    assert_same_update(other="fused", **{"auxiliary_losses": LOSSES, "rtol": 1e-4, **OTHERS[name]})


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("name", ["squashed, V-trace", "frozen actor", "discrete"])
def test_training_of_the_device_engine(name, monkeypatch):
    """The device engine trains as the reference does, with all losses."""
    same_draws(monkeypatch)
    given = {"auxiliary_losses": LOSSES, **OTHERS[name]}
    env = given.pop("env", {})
    models = [run(backend=backend, env_kwargs=env, timesteps=96, **given) for backend in ("eager", "device")]
    assert changed(*models, tolerance=1e-4) == ""
    assert [f"train/{name}_loss" in logged(models[1]) for name in LOSSES] == [True] * 4


@pytest.mark.integration
def test_compiled_update(quick_compiler):
    """The compiled loss is that of the reference, but for the noise, in all updates without compiling anew."""
    from torch._dynamo.utils import counters

    losses = {name: LOSSES[name] for name in LOSSES if name != "caps_spatial"}
    counters.clear()
    models = [run(backend=backend, auxiliary_losses=losses, timesteps=32 * 4) for backend in ("eager", "compile")]
    assert changed(*models, tolerance=1e-4) == ""
    assert counters["stats"]["unique_graphs"] == 1
    counters.clear()
    with_noise = run(backend="compile", auxiliary_losses=LOSSES)
    expected = run(backend="eager", auxiliary_losses=LOSSES)
    assert counters["stats"]["unique_graphs"] == 1
    name = "train/caps_spatial_loss"
    assert logged(with_noise)[name] == pytest.approx(logged(expected)[name], rel=0.5)


def test_tensor_environments():
    """With environments that step in tensors, everything stays on the device."""
    losses = dict(mirror=dict(coef=0.5, obs=[0, [1, -1], [2, -1]], action=[[0, -1]]), caps_temporal=0.1)
    model = PPOExt("MlpPolicy", tensor_env("cpu"), n_steps=8, batch_size=64, n_epochs=2, auxiliary_losses=losses)
    model.learn(256)
    assert logged(model)["train/mirror_loss"] > 0
    assert logged(model)["train/caps_temporal_loss"] > 0


def test_native_engine_steps_aside():
    """`"auto"` takes another engine, `"native"` refuses and says why; without losses that count, both take it."""
    assert type(make(auxiliary_losses=LOSSES)._find_engine()) is FusedEngine
    with pytest.raises(ValueError, match=r"`backend='native'`.*`auxiliary_losses` evaluates the policy"):
        make(auxiliary_losses=LOSSES, backend="native")
    assert type(make(auxiliary_losses={})._find_engine()) is NativeEngine
    assert type(make(auxiliary_losses=dict(caps_temporal=0.0))._find_engine()) is NativeEngine
    assert type(make(auxiliary_losses=LOSSES, backend="eager")._find_engine()) is EagerEngine


def test_no_losses_change_nothing():
    """Without a loss that counts, a training is equal to the bit."""
    plain = run(backend="eager")
    for losses in ({}, dict(caps_temporal=0), {name: {**dict(coef=0), **_keywords(name)} for name in LOSSES}):
        assert changed(plain, run(backend="eager", auxiliary_losses=losses)) == ""


def _keywords(name):
    return {} if name == "caps_temporal" else {key: value for key, value in LOSSES[name].items() if key != "coef"}


def test_losses_are_added():
    """The logged loss is the sum of all losses, each with its coefficient."""
    options = dict(backend="eager", n_epochs=1, batch_size=32, ent_coef=0.1, auxiliary_losses=LOSSES, timesteps=32)
    log = logged(run(**options))
    expected = log["train/policy_gradient_loss"] + 0.1 * log["train/entropy_loss"] + 0.5 * log["train/value_loss"]
    for name, given in LOSSES.items():
        expected += (given if isinstance(given, float) else given["coef"]) * log[f"train/{name}_loss"]
    assert log["train/loss"] == pytest.approx(expected, rel=1e-5)


def test_changed_between_two_trainings():
    """Losses can be changed in place; the engine changes with them, and what is not valid is refused."""
    model = make(auxiliary_losses=dict(caps_temporal=0.1)).learn(32)
    model.auxiliary_losses["mirror"] = LOSSES["mirror"]
    model.learn(32)
    assert "train/mirror_loss" in logged(model)
    model.auxiliary_losses = None
    model.learn(32)
    assert type(model._find_engine()) is NativeEngine
    model.auxiliary_losses = dict(mirror=dict(LOSSES["mirror"], action=[0]))
    with pytest.raises(ValueError, match=r"`auxiliary_losses\['mirror'\]\['action'\]=\[0\]`"):
        model.learn(32)


def test_zip():
    """A zip has the losses, and can be read without unpickling."""
    model = run(auxiliary_losses=LOSSES)
    loaded = Zip(model).load(env=make_toys())
    assert loaded.auxiliary_losses == LOSSES
    loaded.learn(32)
    assert Zip(model).load(env=make_toys(), trusted=False, auxiliary_losses=None).auxiliary_losses is None


def test_numbers_of_numpy():
    """Numbers of NumPy, as a script computes them, are those of Python in the model."""
    pairs = [[np.int64(0), np.int64(1)], [np.int64(1), np.int64(-1)], 2]
    model = make(auxiliary_losses=dict(mirror=dict(coef=np.float32(0.5), obs=pairs, action=[0, 1])))
    assert model.auxiliary_losses == dict(mirror=dict(coef=0.5, obs=[[0, 1], [1, -1], 2], action=[0, 1]))


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        (0.5, r"`auxiliary_losses=0.5`.*give a dictionary, or None"),
        (["mirror"], r"`auxiliary_losses=\['mirror'\]`.*give a dictionary"),
        (dict(miror=0.5), r"`auxiliary_losses` has no option `miror`: did you mean `mirror`"),
        (dict(mirror=0.5), r"`auxiliary_losses\['mirror'\]=0.5`.*lacks `obs` and `action`.*dict\(coef"),
        (dict(mirror=dict(coef=0.5, obs=[0])), r"`auxiliary_losses\['mirror'\]=.*lacks `action`"),
        (dict(mirror=dict(MIRROR)), r"`auxiliary_losses\['mirror'\]=.*lacks `coef`"),
        (dict(mirror=dict(coef=-1, **MIRROR)), r"`auxiliary_losses\['mirror'\]\['coef'\]=-1`.*at least 0"),
        (dict(mirror=dict(coef=1, sign=2, **MIRROR)), r"`auxiliary_losses\['mirror'\]` has no option `sign`"),
        (dict(caps_temporal="0.1"), r"`auxiliary_losses\['caps_temporal'\]\['coef'\]='0.1'`.*give a number"),
        (dict(caps_temporal=float("nan")), r"`auxiliary_losses\['caps_temporal'\]\['coef'\]=nan`"),
        (dict(caps_temporal=dict(coef=1, std=1)), r"`auxiliary_losses\['caps_temporal'\]` has no option `std`"),
        (dict(caps_spatial=0.1), r"`auxiliary_losses\['caps_spatial'\]=0.1`.*lacks `std`.*noise of the measurements"),
        (dict(caps_spatial=dict(coef=0.1, std=0)), r"`auxiliary_losses\['caps_spatial'\]\['std'\]=0`.*greater than 0"),
        (dict(mirror=dict(coef=0.1, obs=[1], action=[0])), r"`auxiliary_losses\['mirror'\]\['obs'\]=\[1\]`"),
    ],
    ids=str,
)
def test_bad_values(losses, message):
    """Names and values that are not valid are refused with the remedy, also where there is no environment yet."""
    with pytest.raises(ValueError, match=message):
        make(auxiliary_losses=losses)
    with pytest.raises(ValueError, match=message):
        PPOExt("MlpPolicy", None, auxiliary_losses=losses, _init_setup_model=False)


def test_policy_without_its_distribution():
    """A policy that does not set `action_dist` where it evaluates actions is refused, as for other losses."""
    from stable_baselines3.common.policies import ActorCriticPolicy

    class Silent(ActorCriticPolicy):
        def evaluate_actions(self, obs, actions):
            before = self.action_dist
            self.action_dist = type(before)(before.action_dim)
            results = super().evaluate_actions(obs, actions)
            self.action_dist = before
            return results

    with pytest.raises(ValueError, match=r"`auxiliary_losses\['caps_temporal'\]=0.1`.*does not set `action_dist`"):
        run(policy=Silent, auxiliary_losses=dict(caps_temporal=0.1))


def test_names_are_not_free_for_others():
    """A subclass's own loss cannot log under the names of these losses."""

    class Clashing(PPOExt):
        def extra_actor_loss(self, rollout_data, distribution):
            return 0.0, {"mirror_loss": 1.0}

    with pytest.raises(ValueError, match=r"`extra_actor_loss='mirror_loss'`"):
        make(Clashing).learn(32)


def test_not_finite():
    """A loss that is not finite is named."""
    model = make(auxiliary_losses=dict(caps_temporal=1e38), backend="eager", learning_rate=1e-2, bad_gradients="raise")
    with th.no_grad():
        model.policy.action_net.weight.mul_(1e6)
    with pytest.raises(ValueError, match="caps_temporal_loss"):
        model.learn(64)


def test_every_loss_is_tested():
    """All losses of the registry are covered here."""
    assert LOSSES.keys() == EXTRA_LOSSES.keys()
