"""Each option acts in training, changes what it should and only that, and is logged."""

import copy
import itertools
import math
import warnings
from types import MethodType

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback, CallbackList
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.save_util import load_from_zip_file
from stable_baselines3.common.torch_layers import FlattenExtractor
from support.parity import assert_equal
from support.toys import BOX_ACTION, DICT, IMAGE, Brittle, LogRecorder, RolloutRecorder, make_toys

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.engines.engine import Engine
from sb3_ppo_ext.rollout.actors import Action, PolicyActor, Transition
from sb3_ppo_ext.update.advantages import AdvantageNormalizer, normalize, vtrace
from sb3_ppo_ext.update.minibatches import PrioritizedSegments
from sb3_ppo_ext.update.optimizers import clip_gradients, critic_parameters
from sb3_ppo_ext.update.rollout import SamplesOnDevice

# Nothing is clipped, so that actor and critic do not influence each other.
SMALL = dict(n_steps=16, batch_size=8, n_epochs=3, seed=3, device="cpu", max_grad_norm=1e9)


def make(algorithm=PPOExt, env_kwargs=None, policy="MlpPolicy", **options):
    return algorithm(policy, make_toys(**(env_kwargs or {})), **{**SMALL, **options})


def run(*args, timesteps=32, **kwargs):
    return make(*args, **kwargs).learn(timesteps)


def changed(one, other, tolerance=0.0):
    """Whether actor and critic differ, by more than a share of what they are."""
    of_critic = {name for name, p in one.policy.named_parameters() if p in critic_parameters(one.policy)}
    a, b = one.policy.state_dict(), other.policy.state_dict()
    differ = {name for name in a if not (a[name] - b[name]).abs().max() <= tolerance * a[name].abs().max()}
    return " and ".join(sorted({"critic" if name in of_critic else "actor" for name in differ}))


def logged(model):
    return dict(model.logger.name_to_value)


BOTH = "actor and critic"
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


@pytest.mark.parametrize(
    "options",
    [
        dict(batch_size=7, accumulate_grad=2),
        dict(vtrace=True, priority_alpha=0.6, kl_coef=0.1, advantage_norm="ema"),
        dict(env_kwargs=dict(observation_space=DICT, action_space=spaces.Discrete(3)), policy="MultiInputPolicy"),
    ],
    ids=str,
)
def test_rollout_that_is_copied_to_its_device_once(options, monkeypatch):
    """As on a GPU: the same minibatches."""
    expected = run(backend="eager", timesteps=64, **options)
    copied = []

    def place(self, rollout):
        assert isinstance(rollout.samples, MethodType)
        rollout.copy_to_device()
        copied.append(rollout)

    monkeypatch.setattr(Engine, "place", place)
    model = run(backend="eager", timesteps=64, **options)
    assert_equal(expected.policy.state_dict(), model.policy.state_dict(), "policy")
    assert len(copied) == 2
    assert all(isinstance(rollout.samples, SamplesOnDevice) for rollout in copied)


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("action_space", [BOX_ACTION, spaces.Discrete(3)], ids=["box", "discrete"])
@pytest.mark.parametrize(("options", "base", "expected"), CHANGES, ids=str)
def test_changes_what_it_should(options, base, expected, action_space, backend):
    """In one update, in the middle of the training; what was collected is the same."""
    if "bounds_coef" in {**options, **base} and action_space is not BOX_ACTION:
        pytest.skip("for boxes")
    env = dict(action_space=action_space)
    recorders = [RolloutRecorder(stop_at=17) for _ in range(2)]
    without = make(env_kwargs=env, backend=backend, **base).learn(64, callback=recorders[0])
    with_option = make(env_kwargs=env, backend=backend, **base, **options).learn(64, callback=recorders[1])
    assert_equal(recorders[0].rollouts, recorders[1].rollouts, "rollouts")
    # The native one differentiates some losses by hand, which rounds in another way than autograd.
    assert changed(without, with_option, 1e-5 if backend == "native" else 0.0) == expected


SCHEDULED = [
    dict(lr_decay="linear"),
    dict(lr_decay="cosine"),
    dict(lr_warmup=0.7),
    dict(lr_decay="linear", lr_min_fraction=0.5),
]


@pytest.mark.parametrize("options", SCHEDULED, ids=str)
def test_decay_of_the_learning_rates(options):
    """Counted in training progress: rollouts end at 1/4, 2/4, 3/4 and 4/4 of the training. Both rates are logged and set."""
    log = LogRecorder()
    model = make(learning_rate=0.01, critic_learning_rate=0.02, **options)
    model.set_logger(Logger(None, [log]))
    model.learn(128)
    dumps = [*log.dumps[1:], logged(model)]
    low = options.get("lr_min_fraction", 0.0)
    factors = {
        "linear": [low + (1 - low) * left for left in (0.75, 0.5, 0.25, 0.0)],
        "cosine": [(1 + math.cos(math.pi * done)) / 2 for done in (0.25, 0.5, 0.75, 1.0)],
        "constant": [0.25 / 0.7, 0.5 / 0.7, 1.0, 1.0],
    }[options.get("lr_decay", "constant")]
    assert [dump["train/learning_rate"] for dump in dumps] == pytest.approx([0.01 * f for f in factors])
    assert [dump["train/critic_learning_rate"] for dump in dumps] == pytest.approx([0.02 * f for f in factors])
    rates = {group["role"]: group["lr"] for group in model.policy.optimizer.param_groups}
    assert rates == {"actor": pytest.approx(0.01 * factors[-1]), "critic": pytest.approx(0.02 * factors[-1])}


# Advantages, against SB3's PPO on a buffer that has done the work


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
    """SB3's PPO, which gets normalised advantages and does not normalise, learns the same to the bit."""
    monkeypatch.setattr(NormalizingEMA, "normalizer", AdvantageNormalizer(0.05))
    buffer_class = Normalizing if norm == "rollout" else NormalizingEMA
    theirs = run(PPO, timesteps=96, rollout_buffer_class=buffer_class, normalize_advantage=False)
    ours = run(timesteps=96, advantage_norm=norm, backend="eager")
    assert_equal(theirs.policy.state_dict(), ours.policy.state_dict(), "policy")


def test_ema_is_logged():
    """Raw statistics of the rollout, averages in use, and the share that was clipped."""
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
    """`normalize_advantage=False` goes before."""
    one, other = (run(normalize_advantage=False, advantage_norm=norm) for norm in ("minibatch", "ema"))
    assert other.advantage_normalizer is None
    assert_equal(one.policy.state_dict(), other.policy.state_dict(), "policy")


# V-trace


@pytest.mark.parametrize(("policy", "observation_space"), [("MlpPolicy", None), ("MultiInputPolicy", DICT)])
def test_vtrace_of_the_first_epoch_is_gae(policy, observation_space):
    """The policy is still the one that collected. What is learned agrees but for rounding; a second epoch differs."""
    env = {"observation_space": observation_space} if observation_space else {}
    common = dict(policy=policy, env_kwargs=env, learning_rate=1e-2, optimizer="sgd")
    gae, corrected = (run(n_epochs=1, vtrace=vtrace, **common) for vtrace in (False, True))
    for name, expected in gae.policy.state_dict().items():
        th.testing.assert_close(corrected.policy.state_dict()[name], expected, atol=1e-5, rtol=1e-4)
    gae, corrected = (run(n_epochs=2, vtrace=vtrace, **common) for vtrace in (False, True))
    assert changed(gae, corrected) == BOTH


class Recording(PPOExt):
    """Keeps the targets of every minibatch, and the policy that learns from them."""

    def __init__(self, *args, **kwargs):
        self.seen = []
        super().__init__(*args, **kwargs)

    def extra_actor_loss(self, rollout_data, distribution):
        self.seen.append((rollout_data, {name: p.clone() for name, p in self.policy.state_dict().items()}))
        return super().extra_actor_loss(rollout_data, distribution)


@pytest.mark.parametrize("action_space", [BOX_ACTION, spaces.Discrete(3)], ids=["box", "discrete"])
@pytest.mark.parametrize("length", [4, 5])  # with and without an end at the last step
def test_vtrace_uses_the_current_policy(action_space, length, monkeypatch):
    """In every epoch, of values, ratios, the last value and those of the terminal observations."""
    monkeypatch.setattr("sb3_ppo_ext.update.rollout.EVALUATION_BATCH", 7)
    env = dict(action_space=action_space, length=length, p_end=0.0)
    model = make(Recording, env, vtrace=True, batch_size=32, normalize_advantage=False, learning_rate=0.02)
    model.learn(32)
    assert model._last_episode_starts.all() == (length == 4)
    buffer, policy = model.rollout_buffer, model.policy
    assert len(model._truncations) >= 4
    assert len(model.seen) == 3
    observations, actions = th.tensor(buffer.observations), th.tensor(buffer.actions)
    if isinstance(action_space, spaces.Discrete):
        actions = actions.flatten().long()
    for epoch, (data, parameters) in enumerate(model.seen):
        policy.load_state_dict(parameters)
        with th.no_grad():
            values, log_probs, _ = policy.evaluate_actions(observations, actions)
            last_values = policy.predict_values(th.tensor(model._last_obs)).numpy().flatten()
            rewards = buffer.rewards.copy()
            for step, env_index, observation, old_value in model._truncations:
                new_value = policy.predict_values(th.tensor(observation)[None]).item()
                rewards[step, env_index] += model.gamma * (new_value - old_value)
                assert epoch == 0 or new_value != pytest.approx(old_value, abs=1e-4)
        advantages, returns = vtrace(
            rewards,
            values.numpy().reshape(2, 16).T,
            (log_probs.numpy() - buffer.log_probs.flatten()).reshape(2, 16).T,
            buffer.episode_starts,
            last_values,
            model._last_episode_starts,
            model.gamma,
            model.gae_lambda,
        )
        # Minibatches are shuffled.
        np.testing.assert_allclose(np.sort(data.advantages), np.sort(advantages.flatten()), atol=2e-5)
        np.testing.assert_allclose(np.sort(data.returns), np.sort(returns.flatten()), atol=2e-5)


class Dropout(FlattenExtractor):
    def forward(self, observations):
        return th.nn.functional.dropout(super().forward(observations), 0.5, self.training)


def test_vtrace_evaluates_as_the_policy_collects():
    """Without dropout: the first epoch's targets are GAE's."""
    policy_kwargs = dict(features_extractor_class=Dropout)
    gae, corrected = (make(Recording, vtrace=v, policy_kwargs=policy_kwargs, batch_size=32).learn(32) for v in (False, True))
    expected, actual = (np.sort(model.seen[0][0].returns) for model in (gae, corrected))
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_truncations_are_kept_for_vtrace_alone(tmp_path):
    """As copies, and not in the zip."""
    assert make()._truncations is None
    model = make(vtrace=True)
    observation = np.ones(3, np.float32)
    infos = [{"terminal_observation": observation, "TimeLimit.truncated": True}, {}]
    truncated = list(model._truncated_episodes(np.array([True, False]), infos, 3))
    observation[:] = 7.0
    actor = PolicyActor(model.rollout_buffer, model._rollout_config(CallbackList([]), 16))
    rewards, outputs = np.zeros(2, np.float32), th.zeros(2)
    action = Action(None, np.zeros((2, 2), np.float32), outputs, outputs)
    actor.record(model.policy, Transition(3, np.zeros((2, 3)), np.zeros(2), action, action.samples, rewards, truncated))
    ((step, env_index, kept, value),) = model._truncations
    assert (step, env_index, kept.tolist()) == (3, 0, [1.0, 1.0, 1.0])
    assert value == pytest.approx(model.policy.predict_values(th.ones(1, 3)).item())
    assert rewards.tolist() == pytest.approx([0.99 * value, 0.0])
    model.save(tmp_path / "model")
    assert "_truncations" not in load_from_zip_file(tmp_path / "model")[0]


def test_vtrace_takes_the_buffers_discount():
    """As GAE does: a buffer may have its own."""

    class Discounting(RolloutBuffer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **{**kwargs, "gamma": 0.5, "gae_lambda": 0.3})

    models = [make(Recording, vtrace=v, rollout_buffer_class=Discounting, batch_size=32).learn(32) for v in (False, True)]
    expected, actual = (np.sort(model.seen[0][0].returns) for model in models)
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_vtrace_leaves_the_buffer_alone():
    """What callbacks and SB3's logs read stays as it was estimated while collecting."""
    with_vtrace, without = run(vtrace=True), run()
    assert_equal(without.rollout_buffer.advantages, with_vtrace.rollout_buffer.advantages, "advantages")
    assert_equal(without.rollout_buffer.returns, with_vtrace.rollout_buffer.returns, "returns")


# Prioritised segments


def test_segments_are_drawn_and_weighted():
    """Minibatches are runs of successive steps; all of them come with vtrace as well."""
    model = make(Recording, priority_alpha=1.0, priority_segment=4, batch_size=8, vtrace=True).learn(32)
    observations = model.rollout_buffer.observations
    assert len(model.seen) == 3 * 4
    for data, _ in model.seen:
        assert len(data.observations) == 8
        for segment in data.observations.numpy().reshape(2, 4, -1):
            (place,) = np.flatnonzero((observations == segment[0]).all(axis=1))
            assert place % 4 == 0
            np.testing.assert_array_equal(observations[place : place + 4], segment)
    assert logged(model)["train/priority_beta"] == 1.0


def test_priority_beta_anneals():
    """From 0.4 to 1 over the training."""
    model = make(priority_alpha=0.5)
    model.learn(64, callback=lambda local, _: local["self"].num_timesteps <= 32)
    assert logged(model)["train/priority_beta"] == pytest.approx(0.4 + 0.6 / 2)


def test_priorities_follow_vtrace(monkeypatch):
    """They are those of the advantages of each epoch."""
    seen = []

    class Segments(PrioritizedSegments):
        def __init__(self, advantages, *args):
            seen.append(advantages)
            super().__init__(advantages, *args)

    monkeypatch.setattr("sb3_ppo_ext.update.estimates.PrioritizedSegments", Segments)
    model = run(priority_alpha=0.5, vtrace=True, learning_rate=0.02)
    assert len(seen) == 3
    np.testing.assert_allclose(seen[0], model.rollout_buffer.advantages.reshape(2, 16).T, atol=1e-5)
    assert not np.allclose(seen[0], seen[1], atol=1e-3)


def test_priority_beta_past_the_end():
    """The last rollout may end past the end of the training."""
    assert logged(run(priority_alpha=0.5, timesteps=40))["train/priority_beta"] == 1.0


def test_segments_fit_into_short_rollouts():
    """A tuner may draw any sizes; a minibatch is no larger than it should be."""
    model = make(Recording, priority_alpha=0.5, priority_segment=64, n_steps=4, batch_size=2).learn(8)
    assert [len(data.actions) for data, _ in model.seen] == [2] * 12
    run(priority_alpha=0.5, priority_segment=3, n_steps=16, batch_size=256, timesteps=64)


# KL


@pytest.mark.parametrize(
    "action_space",
    [BOX_ACTION, spaces.Discrete(3), spaces.MultiDiscrete([3, 2]), spaces.MultiBinary(2)],
    ids=lambda space: type(space).__name__,
)
def test_kl_penalty_holds_the_policy_back(action_space):
    """The larger, the smaller the KL divergence of the update."""
    env = dict(action_space=action_space)
    divergences = [
        logged(run(env_kwargs=env, kl_coef=kl_coef, learning_rate=3e-3, n_epochs=10))["train/kl"]
        for kl_coef in (1e-9, 1.0, 100.0)
    ]
    assert divergences[0] > divergences[1] > divergences[2] > 0


def test_kl_is_exact():
    """The first minibatch of an update finds 0, and the log is the mean over the last epoch, as its estimate is."""
    one = run(kl_coef=1e-12, batch_size=32, n_epochs=1)
    assert logged(one)["train/kl"] == pytest.approx(0, abs=1e-9)
    two = run(kl_coef=1e-12, batch_size=32, n_epochs=20, learning_rate=3e-3, timesteps=64)
    assert logged(two)["train/kl"] == pytest.approx(logged(two)["train/approx_kl"], rel=0.3)


@pytest.mark.parametrize(("backend", "rel"), [("eager", 1e-6), ("native", 1e-3)])
def test_kl_of_unknown_families_is_estimated(backend, rel, monkeypatch):
    """The estimate then is the penalty, in the reference to the bit."""
    monkeypatch.setattr("sb3_ppo_ext.update.estimates.parameters", lambda distribution: None)
    options = dict(backend=backend, learning_rate=3e-3, n_epochs=10)
    divergences = [run(kl_coef=kl_coef, **options) for kl_coef in (1e-9, 100.0)]
    small, large = map(logged, reversed(divergences))
    assert small["train/kl"] < large["train/kl"]
    assert small["train/kl"] == pytest.approx(small["train/approx_kl"], rel=rel)


def test_kl_coefficient_follows_what_it_multiplies(monkeypatch):
    """The exact divergence, not its estimate."""
    monkeypatch.setattr("sb3_ppo_ext.update.losses.kl_divergence", lambda old, new: 5.0 + 0 * new.distribution.mean.sum(dim=1))
    model = run(kl_coef=0.1, kl_target=4.0)
    assert logged(model)["train/kl"] == 5.0
    assert model.kl_coefficient.value == 0.1
    model.kl_coefficient.target = 3.0
    model.learn(32)
    assert model.kl_coefficient.value == 0.2


def test_rules_of_what_follows_the_kl():
    """The coefficient: 1.5 and 2, within a factor of a million; the learning rate: 2 and 1.5."""
    model = make(kl_coef=0.1, kl_target=0.01, adaptive_lr_kl=0.01)
    for kl, coefficient, rate in ((0.0151, 2, 1), (0.0149, 1, 1), (0.0201, 2, 1 / 1.5), (0.0066, 0.5, 1), (0.0049, 0.5, 1.5)):
        for adaptive, factor in ((model.kl_coefficient, coefficient), (model.adaptive_lr, rate)):
            before = adaptive.value
            adaptive.update(kl)
            assert adaptive.value == pytest.approx(factor * before)
    for kl, bound in ((1.0, 1e5), (1e-9, 1e-7)):
        for _ in range(60):
            model.kl_coefficient.update(kl)
        assert model.kl_coefficient.value == pytest.approx(bound)


@pytest.mark.parametrize("options", [dict(kl_coef=1.0), dict(kl_coef=1.0, kl_target=0.01), dict(adaptive_lr_kl=0.01)], ids=str)
def test_one_step_per_update(options):
    """Before the only step the policy has not moved: a warning says that the option does nothing."""
    with pytest.warns(UserWarning, match="n_epochs=1, or lower batch_size=32"):
        make(n_epochs=1, batch_size=32, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(n_epochs=1, batch_size=16, **options)
        make(n_epochs=1, batch_size=32)


def test_kl_coefficient_adapts():
    """Doubled after each update whose KL was too large, halved after each that was too small; used and logged."""
    for target, factor in ((1e-6, 2.0), (10.0, 0.5)):
        model = make(kl_coef=0.1, kl_target=target, learning_rate=3e-3)
        used = []
        for n_rollouts in (1, 2, 3):
            model.learn(32 * n_rollouts, reset_num_timesteps=False, callback=lambda local, _: True)
            used.append(logged(model)["train/kl_coef"])
        # The second call makes two rollouts, the third three
        assert used == pytest.approx([0.1, 0.1 * factor**2, 0.1 * factor**5])
        assert model.kl_coefficient.value == pytest.approx(0.1 * factor**6)


def test_learning_rate_follows_the_kl():
    """Divided or multiplied by 1.5 after each update, inside of its bounds; the critic keeps its own."""
    for target, factor in ((1e-9, 1 / 1.5), (100.0, 1.5)):
        model = run(adaptive_lr_kl=target, critic_learning_rate=5e-4, timesteps=96)
        values = logged(model)
        assert values["train/learning_rate"] == pytest.approx(3e-4 * factor**2)
        assert values["train/critic_learning_rate"] == 5e-4
        rates = {group["role"]: group["lr"] for group in model.policy.optimizer.param_groups}
        assert rates == {"actor": pytest.approx(3e-4 * factor**2), "critic": 5e-4}
        assert model.adaptive_lr.value == pytest.approx(3e-4 * factor**3)
    model = run(adaptive_lr_kl=100.0, adaptive_lr_bounds=[1e-5, 4e-4], timesteps=96)
    assert logged(model)["train/learning_rate"] == 4e-4


def test_target_kl_logs_its_epochs():
    """How many were begun."""
    assert logged(run(target_kl=100.0))["train/epochs"] == 3
    assert logged(run(target_kl=1e-9, learning_rate=0.01))["train/epochs"] == 1


# Guards


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
    """From the first minibatch that is clipped too much, the actor rests to the end of the update; the critic learns on."""
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


def test_resting_actor_has_no_gradient_norm():
    """There are no zeros in the log, which would be on another device than the others as well."""
    model = make(max_clip_fraction=0.0, critic_learning_rate=1e-3, optimizer="muon")
    for parameter in model.policy.parameters():
        parameter.grad = th.ones_like(parameter) if parameter in critic_parameters(model.policy) else None
    assert clip_gradients(model.policy, 1.0).keys() == {"critic_grad_norm", "muon_grad_norm"}


def test_resting_actor_does_not_count_in_the_clipping():
    """Its gradient, however large, does not shrink the critic's step."""

    class Steep(PPOExt):
        def extra_actor_loss(self, rollout_data, distribution):
            return 1e6 * distribution.mode().sum(), {}

    model = make(Steep, max_clip_fraction=0.0, max_grad_norm=0.5, learning_rate=1.0, optimizer="sgd", n_epochs=2)
    norms = []
    step = model.policy.optimizer.step

    def recording_step():
        of_critic = critic_parameters(model.policy)
        norms.append(th.cat([p.grad.flatten() for p in of_critic]).norm().item())
        step()

    model.policy.optimizer.step = recording_step
    model.learn(32)
    assert norms[0] < 1e-3
    assert norms[-1] > 0.1


@pytest.mark.parametrize("observation_space", [None, IMAGE])
def test_max_clip_fraction_of_a_shared_extractor(observation_space):
    """It belongs to the actor, and rests."""
    env, policy = (dict(observation_space=IMAGE), "CnnPolicy") if observation_space else ({}, "MlpPolicy")
    model = make(Snapshots, env, policy, max_clip_fraction=0.0, learning_rate=0.01, n_epochs=2).learn(32)
    actors = model.actors()
    assert same(actors[-2], actors[-1])
    if observation_space:
        assert "features_extractor.cnn.0.weight" in actors[0]


class HugeReward(Brittle):
    """One reward whose square is no float32."""

    def __init__(self, **kwargs):
        super().__init__(reward=1e25, at=5, length=1000, p_end=0, **kwargs)


def huge(**options):
    options = {**SMALL, "max_grad_norm": 0.5, "gae_lambda": 0.0, **options}
    return PPOExt("MlpPolicy", HugeReward(), **options)


@pytest.mark.parametrize("options", [{}, dict(accumulate_grad=2), dict(optimizer="muon")], ids=str)
def test_bad_gradients_raise(options):
    """The error names the place and the terms; the step is not made."""
    model = huge(n_epochs=1, batch_size=16, **options)
    before = {name: value.clone() for name, value in model.policy.state_dict().items()}
    message = r"not finite in epoch 0 .* after 16 timesteps.*value_loss inf.*bad_gradients=\"skip\""
    with pytest.raises(ValueError, match=message):
        model.learn(16)
    assert_equal(before, model.policy.state_dict(), "policy")
    assert all(p.grad is None or not p.grad.any() for p in model.policy.parameters())


def test_bad_gradients_name_the_bad_part():
    """The terms of the minibatch in which it lies, whichever of the accumulated ones that is."""
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
def test_term_that_is_not_finite(in_gradient):
    """Of a subclass, with or without a gradient that is not finite either; parameters are named."""

    class Infinite(PPOExt):
        def extra_actor_loss(self, rollout_data, distribution):
            return (distribution.mode().sum() if in_gradient else th.tensor(1.0)) * math.inf, {}

    model = make(Infinite, bad_gradients="skip").learn(32)
    assert model.n_skipped_updates == 12
    found = r"policy_net.*action_net\.weight" if in_gradient else "none"
    with pytest.raises(ValueError, match=f"Gradients that are not finite: .*{found}"):
        make(Infinite).learn(32)


# Accumulation


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(advantage_norm="rollout"),
        dict(normalize_advantage=False),
        dict(n_steps=20),  # what is left makes a smaller step
        dict(n_steps=19),  # ... of minibatches that are not equal
        dict(priority_alpha=0.7, priority_segment=4),
        dict(priority_alpha=0.7, priority_segment=8),
        dict(batch_size_of_one=True),
        dict(kl_coef=1.0, bounds_coef=0.1, bounds_limit=0.0, ent_coef=0.1, surrogate="spo"),
        dict(vtrace=True, clip_range_vf=0.1, vf_clip_mode="max"),
        dict(target_kl=0.005, learning_rate=3e-3),
        dict(max_clip_fraction=0.2, learning_rate=0.02),
        dict(max_grad_norm=0.5, critic_learning_rate=1e-3),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")
def test_accumulated_gradients_are_those_of_a_larger_batch(options):
    """Whatever else is on: 4 minibatches of 4 are one of 16, to rounding."""
    size = 1 if options.pop("batch_size_of_one", False) else 4
    options = {"learning_rate": 0.01, "optimizer": "sgd", "timesteps": 64, **options}
    large = run(batch_size=16, **options)
    small = run(batch_size=size, accumulate_grad=16 // size, **options)
    for name, expected in large.policy.state_dict().items():
        th.testing.assert_close(small.policy.state_dict()[name], expected, atol=2e-5, rtol=1e-4)
    for name in ("train/grad_norm", "train/n_updates"):
        assert logged(small)[name] == pytest.approx(logged(large)[name], rel=1e-3)


def test_target_kl_judges_the_accumulated_step(monkeypatch):
    """By the mean over its minibatches: 1 in the first of four is 0.25 in all."""
    divergences = itertools.cycle([1.0, 0.0, 0.0, 0.0])
    monkeypatch.setattr("sb3_ppo_ext.update.ppo_loss.approximate_kl", lambda ratio, log_ratio: th.tensor(next(divergences)))
    for target_kl, n_minibatches in ((0.16, 4), (0.17, 24)):
        model = make(Recording, batch_size=4, accumulate_grad=4, target_kl=1.0001 * target_kl).learn(32)
        assert len(model.seen) == n_minibatches


# The hook


class Symmetric(PPOExt):
    """The mean action for a mirrored observation shall be the mirrored one."""

    def extra_actor_loss(self, rollout_data, distribution):
        mirrored = self.policy.get_distribution(-rollout_data.observations)
        difference = (distribution.mode() + mirrored.mode()).square().mean()
        return 10.0 * difference, {"asymmetry": difference, "symmetry/batch": float(len(rollout_data.actions))}


def test_extra_actor_loss():
    """It is minimised and logged."""
    model = make(Symmetric, policy_kwargs=dict(net_arch=[8]), learning_rate=0.01)
    with th.no_grad():
        model.policy.action_net.bias.fill_(0.5)  # the same for both mirror images
    model.learn(32)
    first = logged(model)
    assert first["train/extra_actor_loss"] == pytest.approx(10 * first["train/asymmetry"])
    model.learn(640)
    assert logged(model)["train/asymmetry"] < 0.05 * first["train/asymmetry"]
    assert logged(model)["symmetry/batch"] == 8


def test_extra_actor_loss_has_a_distribution_of_its_own():
    """Another one that the hook asks for does not overwrite it: a policy that is its mirror image has no asymmetry."""
    model = make(Symmetric, policy_kwargs=dict(net_arch=[]), learning_rate=0.0)
    with th.no_grad():
        model.policy.action_net.weight.fill_(1.0)
    model.learn(32)
    assert logged(model)["train/asymmetry"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("name", ["approx_kl", "grad_norm", "loss"])
def test_names_that_the_hook_cannot_log(name):
    """They mean something else."""

    class Clashing(PPOExt):
        def extra_actor_loss(self, rollout_data, distribution):
            return 0.0, {name: 1.0}

    with pytest.raises(ValueError, match=f"`extra_actor_loss='{name}'`.*another one"):
        make(Clashing).learn(32)


def test_number_as_extra_actor_loss():
    """It has no gradient, but is logged."""

    class Constant(PPOExt):
        def extra_actor_loss(self, rollout_data, distribution):
            return np.float32(3.0), {}

    model = run(Constant, backend="eager")
    assert logged(model)["train/extra_actor_loss"] == 3.0
    assert_equal(run(backend="eager").policy.state_dict(), model.policy.state_dict(), "policy")


# Policies of another make


class OwnNormal(ActorCriticPolicy):
    """Does not use `action_dist` for what it evaluates."""

    def evaluate_actions(self, obs, actions):
        latent_pi, latent_vf = self.mlp_extractor(self.extract_features(obs))
        normal = th.distributions.Normal(self.action_net(latent_pi), self.log_std.exp())
        return self.value_net(latent_vf), normal.log_prob(actions).sum(1), normal.entropy().sum(1)


def test_policy_that_does_not_set_its_distribution():
    """Options that need it are refused, for they would do nothing; without them it learns."""
    for options in (dict(kl_coef=1.0), dict(bounds_coef=1.0)):
        (name,) = options
        with pytest.raises(ValueError, match=f"`{name}=1.0`.*OwnNormal does not set `action_dist`"):
            run(policy=OwnNormal, **options)
    run(policy=OwnNormal)


def test_policy_without_action_dist():
    """As with SB3's PPO."""

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


def test_extra_actor_loss_sees_what_the_policy_loss_uses():
    """Minibatches of SB3's, whose advantages are normalised."""
    model = make(Recording, advantage_norm="minibatch").learn(32)
    for data, _ in model.seen:
        assert data.advantages.mean().item() == pytest.approx(0, abs=1e-6)
        assert data.advantages.std().item() == pytest.approx(1, abs=1e-5)


# Diagnostics


def test_diagnostics():
    """Against what can be computed from the outside."""
    log = LogRecorder()
    model = make(max_grad_norm=0.5, n_epochs=1, batch_size=32)
    model.set_logger(Logger(None, [log]))
    norms = []
    step = model.policy.optimizer.step

    def recording_step():
        norms.append(th.cat([p.grad.flatten() for p in model.policy.parameters()]).norm().item())
        step()

    model.policy.optimizer.step = recording_step
    model.learn(32)
    values = logged(model)
    assert values["train/grad_norm"] > 0.5
    assert values["train/grad_norm_clipped"] == pytest.approx(norms[0], rel=1e-4) == pytest.approx(0.5)
    # One minibatch, before any step: the policy is still the one that collected.
    assert values["train/ratio_mean"] == pytest.approx(1, abs=1e-6)
    assert values["train/ratio_std"] == pytest.approx(0, abs=1e-6)
    assert values["train/ratio_max"] == pytest.approx(1, abs=1e-6)
    actions = model.rollout_buffer.actions
    outside = (actions <= BOX_ACTION.low) | (actions >= BOX_ACTION.high)
    assert values["train/actions_at_bounds"] == pytest.approx(outside.mean())
    assert 0 < values["train/actions_at_bounds"] < 1
    assert log.dumps[0]["time/rollout_seconds"] > 0
    assert values["time/update_seconds"] > 0


def test_ratio_statistics():
    """Of the last epoch, over all samples."""
    model = make(Recording, n_epochs=2, learning_rate=0.01)
    model.learn(32)
    ratios = []
    for data, parameters in model.seen[4:]:
        model.policy.load_state_dict(parameters)
        with th.no_grad():
            _, log_prob, _ = model.policy.evaluate_actions(data.observations, data.actions)
        ratios.append((log_prob - data.old_log_prob).exp())
    ratios = th.cat(ratios)
    values = logged(model)
    assert values["train/ratio_mean"] == pytest.approx(ratios.mean().item(), rel=1e-5)
    assert values["train/ratio_std"] == pytest.approx(ratios.std(correction=0).item(), rel=1e-4)
    assert values["train/ratio_max"] == pytest.approx(ratios.max().item(), rel=1e-5)


def test_bounds_loss_of_a_squashed_policy():
    """It acts on the mean before the squashing, whose bounds are -1 and 1."""
    policy_kwargs = dict(squash_output=True)
    common = dict(use_sde=True, policy_kwargs=policy_kwargs, bounds_limit=0.0)
    one, other = run(**common), run(**common, bounds_coef=0.1)
    assert changed(one, other) == "actor"
    first = make(**common, bounds_coef=0.1, n_epochs=1, batch_size=32)
    before = copy.deepcopy(first.policy.state_dict())
    first.learn(32)
    first.policy.load_state_dict(before)
    means = first.policy.get_distribution(th.tensor(first.rollout_buffer.observations)).distribution.mean
    assert logged(first)["train/bounds_loss"] == pytest.approx(means.square().sum(dim=1).mean().item(), rel=1e-4)
    assert 0 <= logged(other)["train/actions_at_bounds"] < 0.5


def test_bounds_loss_pulls_the_mean_back():
    """A mean far outside comes back inside, in units of the bounds."""
    model = make(bounds_coef=1.0, learning_rate=0.02, normalize_advantage=False, vf_coef=0.0, n_epochs=10)
    with th.no_grad():
        model.policy.action_net.bias.copy_(th.tensor([4.0, -6.5]))  # z = 4 and -3.5 in [-1, 1] x [-2, 3]
    model.learn(320)
    observation = th.zeros(1, 3)
    z = (model.policy.get_distribution(observation).mode() - T_MIDDLE) / T_HALF
    assert z.abs().max() < 1.6


T_MIDDLE, T_HALF = th.tensor([0.0, 0.5]), th.tensor([1.0, 2.5])


def test_schedules_end_at_the_end():
    """The last rollout may end past it: neither entropy nor critic gets a negative coefficient."""
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
    """Logged where it changes."""
    model = make(ent_coef="lin_0.1")
    model.learn(64, callback=lambda local, _: local["self"].num_timesteps <= 32)
    assert logged(model)["train/ent_coef"] == pytest.approx(0.05)
    assert "train/ent_coef" not in logged(run(ent_coef=0.1))
