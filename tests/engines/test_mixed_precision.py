"""``amp_dtype``: networks in a type of lower precision, everything else in float32."""

import numpy as np
import pytest
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer
from support.toys import DICT, IMAGE, make_toys

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.policies.mixed_precision import LossScale

SMALL = dict(n_steps=16, batch_size=16, n_epochs=2, seed=0, device="cpu")
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
SPACES = {
    "MlpPolicy": {},
    "MlpTransformerPolicy": {},
    "CnnPolicy": dict(observation_space=IMAGE),
    "MultiInputPolicy": dict(observation_space=DICT),
}


@pytest.fixture(params=ROUNDING)
def dtype(request):
    """Each of the types."""
    return request.param


def of_rollout(model):
    """Values and log probabilities of the policy for the samples of the rollout, and those that were recorded."""
    data = model.rollout_buffer._get_samples(th.arange(model.n_steps * model.n_envs))
    values, log_probs, _ = model.policy.evaluate_actions(data.observations, data.actions)
    return values.flatten().detach(), log_probs.detach(), data


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize(("policy", "dtype"), [*zip(SPACES, [*ROUNDING] * 2, strict=True)])
def test_policies(policy, dtype):
    """The networks round as the type does, and the ratio of a policy that was not updated is 1 to this rounding."""
    env = make_toys(length=5, **SPACES[policy])
    model = PPOExt(policy, env, amp_dtype=dtype, **SMALL)
    _, callback = model._setup_learn(64)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, 16)
    values, log_probs, data = of_rollout(model)
    assert values.dtype == log_probs.dtype == th.float32
    assert (log_probs - data.old_log_prob).exp().sub(1).abs().max() <= 4 * ROUNDING[dtype]
    exact = PPOExt(policy, env, **SMALL)
    exact.policy.load_state_dict(model.policy.state_dict())
    expected, _, _ = exact.policy.evaluate_actions(data.observations, data.actions)
    difference = (expected.flatten() - values).abs().max()
    assert 0 < difference <= 20 * ROUNDING[dtype] * max(expected.abs().max(), 0.1)
    model.train()
    assert {parameter.dtype for parameter in model.policy.parameters()} == {th.float32}
    assert {parameter.grad.dtype for parameter in model.policy.parameters() if parameter.grad is not None} == {th.float32}


@pytest.mark.integration
def test_same_course(dtype):
    """A training takes about the course of one in float32, and its metrics do not drift away."""
    models = [PPOExt("MlpPolicy", make_toys(length=5), amp_dtype=each, **SMALL, backend="device") for each in (None, dtype)]
    for model in models:
        model.learn(32 * 10)
    logs = [model.logger.name_to_value for model in models]
    for name in ("train/value_loss", "train/explained_variance", "train/ratio_std", "train/entropy_loss"):
        np.testing.assert_allclose(logs[1][name], logs[0][name], rtol=0.3, atol=0.05, err_msg=name)


def test_overflow_leaves_out_the_step():
    """A gradient beyond the range of float16 halves the factor of the loss, and its step is left out without an error."""
    model = PPOExt("MlpPolicy", make_toys(length=5), amp_dtype="float16", **{**SMALL, "n_epochs": 1})
    model.loss_scale.scale.fill_(2.0**30)
    before = th.cat([parameter.detach().flatten().clone() for parameter in model.policy.parameters()])
    model.learn(32)
    after = th.cat([parameter.detach().flatten() for parameter in model.policy.parameters()])
    assert model.loss_scale.scale == 2.0**28
    assert np.isfinite(model.logger.name_to_value["train/value_loss"])
    assert th.equal(before, after)
    assert all(state["step"] == 0 for state in model.policy.optimizer.state.values())
    model.learn(32 * 12, reset_num_timesteps=False)
    assert model.loss_scale.scale < 2.0**20
    assert any(state["step"] > 0 for state in model.policy.optimizer.state.values())


def test_loss_scale():
    """The factor is halved at once, and doubled after many steps in a row that were made."""
    scale, yes, no = LossScale(), th.tensor(True), th.tensor(False)
    scale.update(yes, no)
    assert scale.scale == LossScale.INITIAL / 2
    for _ in range(LossScale.INTERVAL - 1):
        scale.update(no, yes)
    scale.update(no, no)  # a step that was left out for another reason
    assert scale.scale == LossScale.INITIAL / 2
    scale.update(no, yes)
    assert scale.scale == LossScale.INITIAL


def test_files(tmp_path, dtype):
    """The type and the factor of the loss are saved and loaded, and can be left out by another value."""
    model = PPOExt("MlpPolicy", make_toys(length=5), amp_dtype=dtype, **SMALL).learn(64)
    model.save(tmp_path / "model")
    loaded = PPOExt.load(tmp_path / "model", make_toys(length=5), device="cpu")
    assert loaded.amp_dtype == dtype
    assert loaded._choose_backend()[0] == "device"
    if dtype == "float16":
        assert loaded.loss_scale.state_dict() == model.loss_scale.state_dict()
    observation = model.env.reset()
    assert np.array_equal(
        loaded.predict(observation, deterministic=True)[0], model.predict(observation, deterministic=True)[0]
    )
    loaded.learn(32)
    plain = PPOExt.load(tmp_path / "model", make_toys(length=5), device="cpu", amp_dtype=None)
    assert plain.loss_scale is None
    plain.learn(32)


def test_change_between_two_calls(dtype):
    """The type can be changed between two calls of ``learn``."""
    model = PPOExt("MlpPolicy", make_toys(length=5), **SMALL).learn(32)
    assert model._choose_backend()[0] == "native"
    model.amp_dtype = dtype
    model.learn(32)
    assert model._choose_backend()[0] == "device"
    model.amp_dtype = None
    model.learn(32)
    assert model._choose_backend()[0] == "native"


def test_errors_leave_autocast():
    """A network that fails does not leave the process in lower precision."""
    model = PPOExt("MlpPolicy", make_toys(length=5), amp_dtype="bfloat16", **SMALL)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model.policy.action_net(th.zeros(1, 3))
    assert not th.is_autocast_enabled("cpu")
    assert th.nn.Linear(2, 2)(th.zeros(1, 2)).dtype == th.float32


class OwnBuffer(RolloutBuffer):
    """A rollout buffer of a user's own."""


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(amp_dtype="float8"), '`amp_dtype=.float8.` is not valid: give "bfloat16"'),
        (dict(amp_dtype="bfloat16", backend="native"), 'backend="auto"'),
        (dict(amp_dtype="bfloat16", rollout_buffer_class=OwnBuffer), "amp_dtype.*rollout buffer"),
    ],
    ids=str,
)
def test_bad_input(kwargs, message):
    """What cannot be done is refused before the training."""
    with pytest.raises(ValueError, match=message):
        PPOExt("MlpPolicy", make_toys(), **SMALL, **kwargs)
