"""Each option acts in training, changes what it should and only that, and is logged."""

import math

import pytest
import torch as th
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import ActorCriticPolicy
from support.parity import assert_equal
from support.toys import RolloutRecorder, record_log
from support.training import BOTH, changed, logged, make, run

from sb3_ppo_ext.update.advantages import AdvantageNormalizer, normalize

CHANGES = [
    # Options, what they are added to, what they change
    (dict(advantage_norm="rollout"), {}, "actor"),
    (dict(advantage_norm="ema"), {}, "actor"),
    (dict(adv_ema_warm_start=False), dict(advantage_norm="ema"), "actor"),
    (dict(adv_min_std=10.0), dict(advantage_norm="ema"), "actor"),
    (dict(adv_clip=0.5), dict(advantage_norm="ema"), "actor"),
    (dict(adv_shift_mean=False), dict(advantage_norm="ema"), "actor"),
    (dict(bounds_coef=0.1), dict(bounds_limit=0.0), "actor"),
    (dict(bounds_limit=0.0), dict(bounds_coef=0.1), "actor"),
    (dict(vf_clip_mode="max"), dict(clip_range_vf=0.01), "critic"),
    (dict(normalize_value=True), {}, "critic"),
    (dict(normalize_value=True), dict(clip_range_vf=0.01), "critic"),
    (dict(surrogate="spo"), {}, "actor"),
    (dict(dual_clip=1.01), dict(learning_rate=0.05), "actor"),
    (dict(kl_coef=1.0), {}, "actor"),
    (dict(ent_coef="lin_0.1"), {}, "actor"),
    (dict(vtrace=True), dict(n_epochs=2), BOTH),
    (dict(vtrace_rho=0.5), dict(vtrace=True), BOTH),
    (dict(vtrace_c=0.5), dict(vtrace=True), BOTH),
    (dict(priority_alpha=0.6), {}, BOTH),
    (dict(priority_beta=1.0), dict(priority_alpha=0.6, priority_segment=2), BOTH),
    (dict(priority_segment=4), dict(priority_alpha=0.6), BOTH),
    (dict(priority_beta=1.0), dict(priority_alpha=0.6, priority_segment=2, vf_coef=0.0, surrogate="spo"), "actor"),
    (dict(priority_beta=1.0), dict(priority_alpha=0.6, priority_segment=2, vf_coef=0.0), "actor"),
    (dict(optimizer="adamw"), dict(weight_decay=0.1), BOTH),
    (dict(optimizer="sgd"), {}, BOTH),
    (dict(optimizer="muon"), {}, BOTH),
    (dict(weight_decay=0.1), {}, BOTH),
    (dict(critic_learning_rate=1e-3), {}, "critic"),
    (dict(max_clip_fraction=0.01), dict(learning_rate=0.05), "actor"),
    (dict(accumulate_grad=2), {}, BOTH),
]


@pytest.fixture(scope="module")
def trained():
    """A function from options to a model after one update, in the middle of its training, and its rollouts."""
    found = {}

    def train(**options):
        if (key := str(options)) not in found:
            recorder = RolloutRecorder(stop_at=17)
            found[key] = make(backend="eager", **options).learn(64, callback=recorder), recorder.rollouts
        return found[key]

    return train


@pytest.mark.many(one_in=5)
@pytest.mark.parametrize(("options", "base", "expected"), CHANGES, ids=str)
def test_changes_what_it_should(options, base, expected, trained):
    """In one update in the middle of the training, each option changes the networks it should and not the rollout."""
    (without, rollouts), (with_option, rollouts_with) = trained(**base), trained(**base, **options)
    assert_equal(rollouts, rollouts_with, "rollouts")
    assert changed(without, with_option, 0.0) == expected


SCHEDULED = [
    dict(lr_decay="linear"),
    dict(lr_decay="cosine"),
    dict(lr_warmup=0.7),
    dict(lr_warmup=0.01),
    dict(lr_decay="linear", lr_min_fraction=0.5),
]


@pytest.mark.parametrize("options", SCHEDULED, ids=str)
def test_decay_of_the_learning_rates(options):
    """The decay counts in training progress, here at 1/4, 2/4, 3/4 and 4/4 of the training; both rates are logged and set."""
    model = make(learning_rate=0.01, critic_learning_rate=0.02, **options)
    log = record_log(model)
    model.learn(128)
    dumps = [*log.dumps[1:], logged(model)]
    low = options.get("lr_min_fraction", 0.0)
    factors = {
        "linear": [low + (1 - low) * left for left in (0.75, 0.5, 0.25, 0.0)],
        "cosine": [(1 + math.cos(math.pi * done)) / 2 for done in (0.25, 0.5, 0.75, 1.0)],
        0.7: [0.25, 0.5, 0.75, 1.0],
        0.01: [0.5, 1.0, 1.0, 1.0],
    }[options.get("lr_decay", options.get("lr_warmup"))]
    assert [dump["train/learning_rate"] for dump in dumps] == pytest.approx([0.01 * f for f in factors])
    assert [dump["train/critic_learning_rate"] for dump in dumps] == pytest.approx([0.02 * f for f in factors])
    rates = {group["role"]: group["lr"] for group in model.policy.optimizer.param_groups}
    assert rates == {"actor": pytest.approx(0.01 * factors[-1]), "critic": pytest.approx(0.02 * factors[-1])}


def test_warmup_in_several_calls():
    """A warm-up is part of each training that begins anew, and not of one that goes on after it."""
    model, rates = make(learning_rate=0.01, lr_warmup=0.01), []
    for reset in (True, False, True):
        model.learn(32, reset_num_timesteps=reset)
        rates.append(logged(model)["train/learning_rate"])
    assert rates == pytest.approx([0.005, 0.01, 0.005])
    make(lr_warmup=0.01).learn(0)


class Normalizing(RolloutBuffer):
    """Normalises its advantages over the rollout."""

    def compute_returns_and_advantage(self, last_values, dones):
        super().compute_returns_and_advantage(last_values, dones)
        self.advantages = self.normalized(th.tensor(self.advantages.T.flatten()))

    def normalized(self, flat):
        return normalize(flat).numpy().reshape(self.n_envs, self.buffer_size).T


class NormalizingEMA(Normalizing):
    normalizer = None

    def normalized(self, flat):
        self.normalizer.observe(flat)
        return self.normalizer.normalize(flat).numpy().reshape(self.n_envs, self.buffer_size).T


@pytest.mark.parametrize("norm", ["rollout", "ema"])
def test_advantage_norm_is_that_of_a_normalised_buffer(norm, monkeypatch):
    """SB3's PPO on a buffer that normalises its advantages learns the same, to the bit."""
    monkeypatch.setattr(NormalizingEMA, "normalizer", AdvantageNormalizer(0.05))
    buffer_class = Normalizing if norm == "rollout" else NormalizingEMA
    theirs = run(PPO, timesteps=96, rollout_buffer_class=buffer_class, normalize_advantage=False)
    ours = run(timesteps=96, advantage_norm=norm, backend="eager")
    assert_equal(theirs.policy.state_dict(), ours.policy.state_dict(), "policy")


def test_ema_is_logged():
    """The log has statistics of the rollout, the averages in use, and the share that was clipped."""
    model = run(advantage_norm="ema", adv_clip=1.0, timesteps=64)
    advantages, values = model.rollout_buffer.advantages, logged(model)
    for name in ("mean", "std", "min", "max"):
        assert values[f"adv/raw_{name}"] == pytest.approx(getattr(advantages, name)())
    assert values["adv/ema_mean"] == model.advantage_normalizer.mean != 0
    assert values["adv/ema_std"] == model.advantage_normalizer.std
    z = (advantages - values["adv/ema_mean"]) / values["adv/ema_std"]
    assert values["adv/clamped_fraction"] == pytest.approx((abs(z) > 1).mean())
    assert 0 < values["adv/clamped_fraction"] < 1


def test_no_normalisation_at_all():
    """`normalize_advantage=False` wins over `advantage_norm`."""
    one, other = (run(normalize_advantage=False, advantage_norm=norm) for norm in ("minibatch", "ema"))
    assert other.advantage_normalizer is None
    assert_equal(one.policy.state_dict(), other.policy.state_dict(), "policy")


class OwnNormal(ActorCriticPolicy):
    """Evaluates actions without its `action_dist`."""

    def evaluate_actions(self, obs, actions):
        latent_pi, latent_vf = self.mlp_extractor(self.extract_features(obs))
        normal = th.distributions.Normal(self.action_net(latent_pi), self.log_std.exp())
        return self.value_net(latent_vf), normal.log_prob(actions).sum(1), normal.entropy().sum(1)


def test_policy_that_does_not_set_its_distribution():
    """Options that need the distribution are refused, for they would do nothing; without them the policy learns."""
    for options in (dict(kl_coef=1.0), dict(bounds_coef=1.0)):
        (name,) = options
        with pytest.raises(ValueError, match=f"`{name}=1.0`.*OwnNormal does not set `action_dist`"):
            run(policy=OwnNormal, **options)
    run(policy=OwnNormal)


def test_policy_without_action_dist():
    """A policy without `action_dist` learns the same as with SB3's PPO."""

    class Without(OwnNormal):
        def forward(self, obs, deterministic=False):
            latent_pi, latent_vf = self.mlp_extractor(self.extract_features(obs))
            normal = th.distributions.Normal(self.action_net(latent_pi), self.log_std.exp())
            actions = normal.sample()
            return actions, self.value_net(latent_vf), normal.log_prob(actions).sum(1)

    models = [make(PPO, policy=Without), make(policy=Without, backend="eager")]
    for model in models:
        del model.policy.action_dist
        model.set_random_seed(0)
        model.learn(32)
    assert_equal(models[0].policy.state_dict(), models[1].policy.state_dict(), "policy")


def test_schedules_end_at_the_end():
    """In a last rollout that ends past the end, neither entropy coefficient nor critic rate is negative."""
    values = logged(run(ent_coef=lambda p: 0.1 * p, critic_learning_rate=lambda p: 0.01 * p, timesteps=40))
    assert values["train/ent_coef"] == values["train/critic_learning_rate"] == 0.0


def test_ent_coef_of_a_callback():
    """A number that a callback sets is used, as with SB3's PPO."""

    class Setter(BaseCallback):
        def _on_step(self):
            self.model.ent_coef = 0.3
            return True

    theirs = make(PPO).learn(96, callback=Setter())
    ours = make(backend="eager").learn(96, callback=Setter())
    assert_equal(theirs.policy.state_dict(), ours.policy.state_dict(), "policy")


def test_scheduled_entropy_coefficient():
    """The entropy coefficient is logged where it changes."""
    model = make(ent_coef="lin_0.1")
    model.learn(64, callback=lambda local, _: local["self"].num_timesteps <= 32)
    assert logged(model)["train/ent_coef"] == pytest.approx(0.05)
    assert "train/ent_coef" not in logged(run(ent_coef=0.1))
