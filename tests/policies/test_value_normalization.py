"""`normalize_value`: a critic that predicts returns in units of their running mean and standard deviation."""

import numpy as np
import pytest
import torch as th
from stable_baselines3 import PPO
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import VecEnvWrapper
from support.cases import one_in
from support.parity import assert_equal
from support.toys import IMAGE, VECTOR, make_toys
from support.training import SMALL, logged, make
from support.zips import Zip
from torch import nn

from sb3_ppo_ext import MlpPolicy, PPOExt
from sb3_ppo_ext.policies.value_normalization import NormalizedValue, normalized_value
from sb3_ppo_ext.update.losses import LossConfig, value_loss

LATENTS = th.linspace(-1, 1, 20).reshape(5, 4)


def layer():
    th.manual_seed(0)
    return NormalizedValue(nn.Linear(4, 1))


def test_statistics():
    """The first rollout gives its own mean and standard deviation; the next ones count 0.95 : 1 before the newest."""
    critic = layer()
    critic.observe(th.tensor([[1.0, 3.0], [5.0, 7.0]]))
    assert (critic.mean.item(), critic.std.item()) == pytest.approx((4.0, 5**0.5))
    critic.observe(th.tensor([10.0, 10.0]))
    of_old, of_new = 0.95 / 1.95, 1 / 1.95
    mean, square = of_old * 4 + of_new * 10, of_old * (16 + 5) + of_new * 100
    assert (critic.mean.item(), critic.std.item()) == pytest.approx((mean, (square - mean**2) ** 0.5))


@pytest.mark.parametrize("returns", [[1e4, 1.1e4], [-1e-3, 2e-3], [3.0, 3.0], [1e20, -1e20]], ids=str)
def test_values_are_preserved(returns):
    """New statistics do not change the values, whatever the scale of the returns, nor does going back."""
    critic = layer()
    before = critic(LATENTS)
    for _ in range(3):
        critic.observe(th.tensor(returns))
        scale = max(abs(number) for number in returns)
        th.testing.assert_close(critic(LATENTS), before, rtol=1e-5, atol=1e-6 * max(scale, 1))
    assert critic.std >= NormalizedValue.MIN_STD


def test_values_far_from_0():
    """A change of the statistics preserves values to the precision of float32 also where it moves them by a lot."""
    critic = layer()
    for scale in (1.0, 1e3, 1e-2, 50.0):
        critic.observe(scale * th.tensor([1.0, 2.0, 3.0]))
        before = critic(LATENTS)
        critic.observe(scale * th.tensor([2.0, 3.0, 40.0]))
        th.testing.assert_close(critic(LATENTS), before, rtol=1e-5, atol=1e-6 * critic.std.item())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_returns_that_are_not_finite(bad):
    """They leave statistics and parameters as they were."""
    critic = layer()
    critic.observe(th.tensor([1.0, 2.0]))
    before = {name: tensor.clone() for name, tensor in critic.state_dict().items()}
    critic.observe(th.tensor([1.0, bad]))
    assert_equal(before, critic.state_dict(), "critic")


def test_loss_and_gradient():
    """The loss, and the gradients of weight and bias, are those of the normalised values and returns."""
    critic, returns = layer(), th.tensor([1.0, 30.0, 2.0, 7.0, -5.0])
    critic.observe(returns)
    value_loss(critic(LATENTS).flatten(), th.zeros(5), returns, LossConfig(0.2, value_scale=critic.std.item())).backward()
    plain = nn.Linear(4, 1)
    plain.load_state_dict({name: critic.state_dict()[name] for name in ("weight", "bias")})
    nn.functional.mse_loss(plain(LATENTS).flatten(), (returns - critic.mean) / critic.std).backward()
    th.testing.assert_close(critic.weight.grad, plain.weight.grad)
    th.testing.assert_close(critic.bias.grad, plain.bias.grad)


def test_value_clipping_in_units_of_the_statistics():
    """With a standard deviation of 10, `clip_range_vf=0.5` lets a value move by 5: the loss is ((12 - 5) / 10)^2."""
    config = LossConfig(0.2, clip_range_vf=0.5, value_scale=10.0)
    assert value_loss(th.tensor([8.0]), th.tensor([0.0]), th.tensor([12.0]), config).item() == pytest.approx(0.49)


class LargeRewards(VecEnvWrapper):
    def reset(self):
        return self.venv.reset()

    def step_wait(self):
        observations, rewards, dones, infos = self.venv.step_wait()
        return observations, 1e4 * rewards, dones, infos


@pytest.mark.many(one_in=5)
@pytest.mark.parametrize("backend", one_in(2, ["eager", "fused", "native", "device"]))
def test_training_on_large_returns(backend):
    """The loss is in units of the statistics; what is stored and logged otherwise is in those of the return."""
    env, options = LargeRewards(make_toys(length=5)), dict(backend=backend, learning_rate=3e-3, n_epochs=10)
    model = PPOExt("MlpPolicy", env, **{**SMALL, **options}, normalize_value=True).learn(320)
    critic, log = normalized_value(model.policy), logged(model)
    assert log["train/value_std"] == pytest.approx(critic.std.item(), rel=1e-6)
    assert log["train/value_mean"] == pytest.approx(critic.mean.item(), rel=1e-6)
    assert critic.std > 1e3
    assert log["train/value_loss"] < 10
    values, returns = (np.asarray(part).flatten() for part in (model.rollout_buffer.values, model.rollout_buffer.returns))
    assert np.std(returns) > 1e3
    assert np.std(values) > 100
    assert log["train/explained_variance"] == pytest.approx(1 - np.var(returns - values) / np.var(returns), rel=1e-4)


def test_default_is_sb3s():
    """Without the option, the layer is torch's, and with it, the first rollout is the same to the bit, and measured."""
    assert type(make().policy.value_net) is nn.Linear
    one, other = (make(normalize_value=on, backend="eager").learn(32) for on in (False, True))
    assert_equal(one.rollout_buffer.values, other.rollout_buffer.values, "values")
    critic, returns = normalized_value(other.policy), np.asarray(other.rollout_buffer.returns)
    assert (critic.mean.item(), critic.std.item()) == pytest.approx((returns.mean(), returns.std()), rel=1e-4)


def test_images():
    """A policy of images has the layer, with the parameters that its optimiser knows, and is loaded from a zip."""
    model = make(normalize_value=True, policy="CnnPolicy", env_kwargs=dict(observation_space=IMAGE)).learn(32)
    critic = normalized_value(model.policy)
    assert critic.std != 1
    assert critic.weight in model.policy.optimizer.state
    loaded = Zip(model).load(env=model.env)
    assert_equal(model.policy.state_dict(), loaded.policy.state_dict(), "policy")


def test_policy_by_itself(tmp_path):
    """A policy is saved and loaded with its statistics, and its actor alone has none."""
    policy = make(normalize_value=True).learn(32).policy
    policy.save(tmp_path / "policy.pth")
    loaded = MlpPolicy.load(tmp_path / "policy.pth")
    assert_equal(policy.state_dict(), loaded.state_dict(), "policy")
    observations = th.zeros(2, *VECTOR.shape)
    assert th.equal(policy.predict_values(observations), loaded.predict_values(observations))
    assert normalized_value(policy.without_critic()) is None


def test_zips_with_and_without():
    """A zip goes on with the other value of the option, given to `load`, with the same values."""
    observations = th.linspace(-1, 1, 2 * VECTOR.shape[0]).reshape(2, -1)
    plain = PPO("MlpPolicy", make_toys(), n_steps=16, batch_size=8, device="cpu").learn(32)
    normalised = make(normalize_value=True).learn(32)
    for model, on in ((plain, True), (normalised, False)):
        loaded = Zip(model).load(env=make_toys(), normalize_value=on)
        expected, found = (each.policy.predict_values(observations) for each in (model, loaded))
        th.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert (normalized_value(loaded.policy) is not None) == on
        loaded.learn(32, reset_num_timesteps=False)


def test_other_algorithms_cannot_load_it():
    """SB3's PPO has no place for the statistics, and says so."""
    with pytest.raises(ValueError, match="normalize_value=True"):
        Zip(make(normalize_value=True).learn(32)).load(PPO)


def test_policies_of_users():
    """A policy class without the keyword is refused by name."""

    class Own(ActorCriticPolicy):
        pass

    with pytest.raises(ValueError, match=r"`normalize_value=True`.*Own does not take it"):
        make(policy=Own, normalize_value=True)


class OwnValueNet(MlpPolicy):
    """A user's policy that makes its output of the critic itself"""

    def _build(self, lr_schedule):
        super()._build(lr_schedule)
        self.value_net = th.nn.Linear(self.mlp_extractor.latent_dim_vf, 1)


def test_own_outputs_of_the_critic():
    """They would not be normalised, and are refused by name."""
    with pytest.raises(ValueError, match=r"`normalize_value=True`.*`OwnValueNet` has a `value_net` of its own"):
        make(policy=OwnValueNet, normalize_value=True)
    make(policy=OwnValueNet).learn(32)
