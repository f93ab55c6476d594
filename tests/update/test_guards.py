"""`max_clip_fraction`, and gradients that are not finite."""

import math

import pytest
import torch as th
from stable_baselines3.common.torch_layers import FlattenExtractor
from support.parity import assert_equal
from support.toys import IMAGE, Brittle
from support.training import SMALL, Recording, before_steps, logged, make

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.update.optimizers import clip_gradients, critic_parameters


class Snapshots(Recording):
    def actors(self):
        of_critic = {name for name, p in self.policy.named_parameters() if p in critic_parameters(self.policy)}
        final = {name: p.clone() for name, p in self.policy.state_dict().items()}
        return [{n: p for n, p in s.items() if n not in of_critic} for s in [*(s for _, s in self.seen), final]]

    def critics(self):
        of_critic = {name for name, p in self.policy.named_parameters() if p in critic_parameters(self.policy)}
        return [{n: p for n, p in s.items() if n in of_critic} for _, s in self.seen]


def same(one, other):
    return all(th.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "options", [{}, dict(critic_learning_rate=1e-3), dict(optimizer="muon"), dict(accumulate_grad=2)], ids=str
)
def test_max_clip_fraction(options):
    """
    From the first minibatch that is clipped too much, the actor is frozen to the end of the update; the critic learns on.
    """
    model = make(Snapshots, max_clip_fraction=0.3, learning_rate=0.02, n_epochs=4, **options).learn(32)
    actors, critics = model.actors(), model.critics()
    every = options.get("accumulate_grad", 1)
    moved = [not same(a, b) for a, b in zip(actors[:-1:every], actors[every::every], strict=True)]
    n_moved = sum(moved)
    assert 0 < n_moved < len(moved)
    assert moved == [True] * n_moved + [False] * (len(moved) - n_moved)
    assert not any(same(a, b) for a, b in zip(critics[:-every:every], critics[every::every], strict=True))
    assert logged(model)["train/actor_frozen"] == pytest.approx(1 - n_moved / len(moved))
    # The next rollout finds it at work again.
    model.seen.clear()
    model.learn(32, reset_num_timesteps=False)
    actors = model.actors()
    assert not same(actors[0], actors[every])


def test_frozen_actor_has_no_gradient_norm():
    """The log has no norm of the gradients of a frozen actor."""
    model = make(max_clip_fraction=0.0, critic_learning_rate=1e-3, optimizer="muon")
    for parameter in model.policy.parameters():
        parameter.grad = th.ones_like(parameter) if parameter in critic_parameters(model.policy) else None
    assert clip_gradients(model.policy, 1.0).keys() == {"critic_grad_norm", "muon_grad_norm"}


def test_frozen_actor_does_not_count_in_the_clipping():
    """The gradient of a frozen actor, however large, does not shrink the critic's step."""

    class Steep(PPOExt):
        def extra_actor_loss(self, rollout_data, distribution):
            return 1e6 * distribution.mode().sum(), {}

    model = make(Steep, max_clip_fraction=0.0, max_grad_norm=0.5, learning_rate=1.0, optimizer="sgd", n_epochs=2)
    norms, of_critic = [], critic_parameters(model.policy)
    before_steps(model, lambda: norms.append(th.cat([p.grad.flatten() for p in of_critic]).norm().item()))
    model.learn(32)
    assert norms[0] < 1e-3
    assert norms[-1] > 0.1


@pytest.mark.parametrize("observation_space", [None, IMAGE])
def test_max_clip_fraction_of_a_shared_extractor(observation_space):
    """A shared features extractor belongs to the actor, and is frozen with it."""
    env, policy = (dict(observation_space=IMAGE), "CnnPolicy") if observation_space else ({}, "MlpPolicy")
    model = make(Snapshots, env, policy, max_clip_fraction=0.0, learning_rate=0.01, n_epochs=2).learn(32)
    actors = model.actors()
    assert same(actors[-2], actors[-1])
    if observation_space:
        assert "features_extractor.cnn.0.weight" in actors[0]


class HugeReward(Brittle):
    """Gives one reward whose square is no float32."""

    def __init__(self, **kwargs):
        super().__init__(reward=1e25, at=5, length=1000, p_end=0, **kwargs)


def huge(**options):
    options = {**SMALL, "max_grad_norm": 0.5, "gae_lambda": 0.0, **options}
    return PPOExt("MlpPolicy", HugeReward(), **options)


@pytest.mark.parametrize("options", [{}, dict(accumulate_grad=2), dict(optimizer="muon")], ids=str)
def test_bad_gradients_raise(options):
    """The error names epoch, minibatch and losses; the step is not made."""
    model = huge(n_epochs=1, batch_size=16, **options)
    before = {name: value.clone() for name, value in model.policy.state_dict().items()}
    message = r"not finite in epoch 0 .* after 16 timesteps.*value_loss inf.*bad_gradients=\"skip\""
    with pytest.raises(ValueError, match=message):
        model.learn(16)
    assert_equal(before, model.policy.state_dict(), "policy")
    assert all(p.grad is None or not p.grad.any() for p in model.policy.parameters())


def test_bad_gradients_name_the_bad_minibatch():
    """The error names the losses of the bad minibatch, whichever of the accumulated ones that is."""
    for seed in range(4):
        with pytest.raises(ValueError, match="value_loss inf"):
            huge(n_epochs=1, batch_size=4, accumulate_grad=4, seed=seed).learn(16)


def test_bad_gradients_skip_everything():
    """What cannot be measured is NaN in the log, or missing, and the training goes on."""
    model = huge(bad_gradients="skip", batch_size=16, kl_coef=0.1, bounds_coef=0.1).learn(16)
    assert model.n_skipped_updates == 3
    values = logged(model)
    assert not {"train/kl", "train/bounds_loss"} & values.keys()
    assert math.isnan(values["train/loss"])
    assert math.isnan(values["train/approx_kl"])
    model.learn(16)
    assert math.isfinite(logged(model)["train/loss"])


def test_bad_gradients_skip():
    """One minibatch of each epoch is left out and counted, the others are learned from and logged."""
    model = huge(bad_gradients="skip")
    before = model.policy.state_dict()["value_net.bias"].clone()
    model.learn(16)
    for name in ("loss", "value_loss", "approx_kl", "ratio_mean", "grad_norm"):
        assert math.isfinite(logged(model)[f"train/{name}"]), name
    assert logged(model)["train/skipped_updates"] == model.n_skipped_updates == 3
    assert all(th.isfinite(p).all() for p in model.policy.parameters())
    assert model.policy.optimizer.state[model.policy.value_net.bias]["step"] == 3
    assert not th.equal(before, model.policy.value_net.bias)


@pytest.mark.parametrize("in_gradient", [True, False])
def test_loss_that_is_not_finite(in_gradient):
    """
    A loss of a subclass that is not finite, with or without its gradient, is skipped or refused, and bad parameters are named.
    """

    class Infinite(PPOExt):
        def extra_actor_loss(self, rollout_data, distribution):
            return (distribution.mode().sum() if in_gradient else th.tensor(1.0)) * math.inf, {}

    model = make(Infinite, bad_gradients="skip").learn(32)
    assert model.n_skipped_updates == 12
    found = r"policy_net.*action_net\.weight" if in_gradient else "none"
    with pytest.raises(ValueError, match=f"Gradients that are not finite: .*{found}"):
        make(Infinite).learn(32)


@pytest.mark.parametrize("backend", ["eager", "fused", "native"])
def test_value_loss_that_overflows(backend):
    """A loss may be infinite while its gradient is finite, and is refused on every engine, without a warning of NumPy."""
    with pytest.raises(ValueError, match="value_loss inf"):
        PPOExt("MlpPolicy", Brittle(reward=1e30, at=3), **{**SMALL, "backend": backend}).learn(32)


@pytest.mark.parametrize("backend", ["eager", "fused", "native"])
def test_norm_that_overflows(backend):
    """Losses and gradients may be finite while the norm of the gradients is not."""
    model = make(backend=backend, vf_coef=1e22)
    with pytest.raises(ValueError, match="Gradients that are not finite: none, but their norm overflows"):
        model.learn(32)


@pytest.mark.parametrize("backend", ["eager", "fused", "native"])
@pytest.mark.parametrize(("limit", "is_frozen"), [(0.1, 0.0), (0.0999, 1.0)])
def test_a_clip_fraction_at_the_limit(backend, limit, is_frozen):
    """One clipped sample of ten is not more than 0.1, on every engine."""
    model = make(backend=backend, n_steps=5, batch_size=10, n_epochs=1, max_clip_fraction=limit)
    _, callback = model._setup_learn(10**6)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, 5)
    model.rollout_buffer.log_probs[2, 1] -= 1.0
    model.train()
    assert logged(model)["train/clip_fraction"] == pytest.approx(0.1)
    assert logged(model)["train/actor_frozen"] == is_frozen


class NaNFeatures(FlattenExtractor):
    """Features that are NaN in one minibatch."""

    n_calls = 0

    def forward(self, observations):
        if self.training and th.is_grad_enabled():
            self.n_calls += 1
        return super().forward(observations) * (math.nan if self.n_calls == 3 else 1.0)


@pytest.mark.parametrize("backend", ["eager", "fused", "device"])
def test_nan_is_not_past_target_kl(backend):
    """A KL divergence that is NaN does not end the update without a word: its step is skipped, or raises an error."""
    options = dict(backend=backend, action_dist="beta", policy_kwargs=dict(features_extractor_class=NaNFeatures))
    model = make(target_kl=100.0, bad_gradients="skip", n_epochs=3, **options).learn(32)
    assert model.n_skipped_updates == 1
    assert model._n_updates == 3
    assert model.policy.features_extractor.n_calls > 4
    with pytest.raises(ValueError, match=r"not finite|NaN"):
        make(target_kl=100.0, bad_gradients="raise", n_epochs=3, **options).learn(32)
