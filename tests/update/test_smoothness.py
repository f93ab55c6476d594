"""Smooth actions (CAPS)."""

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from support import memory
from support.masks import make_masked
from support.toys import DICT, IMAGE, make_toys
from support.training import changed, logged, make, run

from sb3_ppo_ext import ActionMaskWrapper, PPOExt
from sb3_ppo_ext.distributions import location
from sb3_ppo_ext.losses import smoothness_loss
from sb3_ppo_ext.update.smoothness import SpatialSmoothness


def test_smoothness_loss():
    """The mean Euclidean distance: 5 for (3, 4), 0 for the same action, whose gradient is 0."""
    actions = th.tensor([[3.0, 4.0], [1.0, 1.0]], requires_grad=True)
    loss = smoothness_loss(actions, th.tensor([[0.0, 0.0], [1.0, 1.0]]))
    assert loss.item() == 2.5
    loss.backward()
    np.testing.assert_allclose(actions.grad, [[0.3, 0.4], [0.0, 0.0]], rtol=1e-6)


def test_slope_of_the_loss():
    """The gradient is that of finite differences."""
    first, second = (th.randn(4, 3, dtype=th.float64, requires_grad=True) for _ in range(2))
    assert th.autograd.gradcheck(smoothness_loss, (first, second))


def filled(backend="eager", policy="MlpPolicy", **options):
    """A model with a full rollout, whose episodes end in between."""
    model = make(policy=policy, env_kwargs=dict(length=5), backend=backend, **options)
    model.learn(32)
    return model


@pytest.mark.parametrize("backend", ["eager", "device"])
def test_next_observations(backend):
    """The next observation is that of the next step of the same environment, and the own one where the episode ends."""
    model = filled(backend)
    rollout = model._rollout()
    order = np.random.default_rng(0).permutation(32)
    found = np.asarray(rollout.next_observations(th.as_tensor(order)))
    observations = np.asarray(rollout.buffer.observations).reshape(2, 16, 3)
    starts = rollout.buffer.episode_starts
    n_ends = 0
    for index, following in zip(order, found, strict=True):
        env, step = divmod(index, 16)
        ends = step == 15 or starts[step + 1, env]
        n_ends += ends
        np.testing.assert_array_equal(following, observations[env, step if ends else step + 1])
    assert 6 < n_ends < 16


MEMORY = {
    "MlpTransformerPolicy": dict(policy_kwargs=dict(context_length=4, d_model=8, n_heads=2, use_last_action=True)),
    "MlpLstmPolicy": dict(policy_kwargs=dict(lstm_hidden_size=8)),
}


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize(
    ("policy", "backend"), [(p, b) for p in MEMORY for b in ("eager", "device") if b != "device" or "T" in p[3:]]
)
def test_next_observations_of_policies_with_a_memory(policy, backend):
    """What a policy with a memory would do at the next step is what it does there, with its history."""
    model = filled(backend, policy, **MEMORY[policy])
    memory.loud(model.policy)
    rollout = model._rollout()
    n = 32

    def actions(observations):
        with th.no_grad():
            return location(model.policy.get_distribution(observations)).numpy()

    each = np.concatenate([actions(rollout.buffer._get_samples([i]).observations) for i in range(n)])
    order = np.random.default_rng(1).permutation(n)
    following = actions(rollout.next_observations(th.as_tensor(order)))
    starts = rollout.buffer.episode_starts
    for index, found in zip(order, following, strict=True):
        env, step = divmod(index, 16)
        goes_on = step < 15 and not starts[step + 1, env]
        np.testing.assert_allclose(found, each[index + goes_on], rtol=1e-4, atol=1e-5)


def test_temporal_loss_by_hand():
    """The logged loss is the mean over all samples of the distance of successive mean actions, 0 at the end of an episode."""
    model = make(
        env_kwargs=dict(length=5), backend="eager", learning_rate=0.0, auxiliary_losses=dict(caps_temporal=0.5)
    ).learn(32)
    buffer = model.rollout_buffer
    with th.no_grad():
        means = model.policy.get_distribution(th.as_tensor(buffer.observations)).mode().numpy().reshape(2, 16, 2)
    total = 0.0
    for env in range(2):
        for step in range(15):
            if not buffer.episode_starts[step + 1, env]:
                total += np.linalg.norm(means[env, step] - means[env, step + 1])
    log = logged(model)
    assert log["train/caps_temporal_loss"] == pytest.approx(total / 32, rel=1e-5)
    assert total > 0
    options = dict(env_kwargs=dict(length=5), backend="eager", learning_rate=0.0, n_epochs=1, batch_size=32)
    losses = [logged(run(auxiliary_losses=given, **options))["train/loss"] for given in (dict(caps_temporal=0.5), None)]
    assert losses[0] - losses[1] == pytest.approx(0.5 * total / 32, rel=1e-3)


@pytest.mark.parametrize("backend", ["eager", "fused"])
def test_ends_of_recurrent_policies(backend):
    """Where an episode ends the loss is 0, although an old state of the rollout makes the two actions differ."""
    losses = dict(caps_temporal=1.0)
    options = dict(policy="MlpLstmPolicy", env_kwargs=dict(length=5), learning_rate=0.0, batch_size=32)
    model = make(**options, **MEMORY["MlpLstmPolicy"], backend=backend, auxiliary_losses=losses).learn(32)
    with th.no_grad():
        for parameter in model.policy.lstm_actor.parameters():
            parameter.add_(0.5)
        rollout, indices = model._rollout(), th.arange(32)
        observations = rollout.samples(indices).observations, rollout.next_observations(indices)
        now, following = (location(model.policy.get_distribution(each)).clone() for each in observations)
    distances, continues = (now - following).norm(dim=1).numpy(), rollout.continues(indices).numpy()
    assert 6 < (~continues).sum() < 16
    assert distances[~continues].max() > 1e-3
    model.train()
    # Not equal: minibatches begin at a random step, and the first episode there with the state of the rollout.
    assert logged(model)["train/caps_temporal_loss"] == pytest.approx((distances * continues).mean(), rel=0.3)
    assert distances.mean() > 2 * (distances * continues).mean()


def test_spatial_loss_of_a_linear_policy():
    """With a linear policy of one action, the loss is the mean of the absolute value of a Gaussian."""
    env = make_toys(action_space=spaces.Box(-1, 1, (1,), np.float32))
    options = dict(n_steps=2048, batch_size=4096, n_epochs=1, learning_rate=0.0, seed=0, device="cpu", backend="eager")
    losses = dict(caps_spatial=dict(coef=1.0, std=0.1))
    model = PPOExt("MlpPolicy", env, policy_kwargs=dict(net_arch=[]), auxiliary_losses=losses, **options)
    with th.no_grad():
        model.policy.action_net.weight.copy_(th.tensor([[3.0, 0.0, -4.0]]))
    model.learn(4096)
    assert logged(model)["train/caps_spatial_loss"] == pytest.approx(5 * 0.1 * np.sqrt(2 / np.pi), rel=0.05)


def test_noise_of_dictionaries():
    """Noise is added to floats alone: not to images, integers, and masks."""
    model = make(policy="MultiInputPolicy", env_kwargs=dict(observation_space=DICT), backend="eager")
    loss = SpatialSmoothness.make("where", 1.0, dict(std=0.1), model.policy, None)
    assert loss.keys == ("joints",)
    observations = model.policy.obs_to_tensor(
        {key: DICT[key].sample()[None] if key != "gear" else np.array([1]) for key in DICT}
    )[0]
    noisy = loss._perturbed(observations)
    assert {key for key in noisy if not th.equal(noisy[key], observations[key])} == {"joints"}
    masked = PPOExt(
        "MlpPolicy",
        make_masked(wrapper=ActionMaskWrapper),
        n_steps=8,
        action_masking=True,
        action_mask_key="action_mask",
    )
    assert "action_mask" not in SpatialSmoothness.make("where", 1.0, dict(std=0.1), masked.policy, None).keys


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("losses", [dict(caps_temporal=1.0), dict(caps_spatial=dict(coef=1.0, std=0.3))], ids=list)
def test_actions_become_smooth(losses):
    """The losses make the actions depend less on the observation; critics are as they were."""
    options = dict(learning_rate=0.01, normalize_advantage=False, n_epochs=10, batch_size=32)
    plain, smooth = run(timesteps=640, **options), run(timesteps=640, auxiliary_losses=losses, **options)
    observations = th.rand(200, 3) * 2 - 1
    spreads = [m.policy.get_distribution(observations).mode().std(dim=0).mean().item() for m in (plain, smooth)]
    assert spreads[1] < 0.5 * spreads[0]


@pytest.mark.parametrize("name", ["caps_temporal", "caps_spatial"])
def test_what_changes(name):
    """The loss changes the actor alone; with the coefficient 0 it changes nothing, and the native engine may be used."""
    losses = {name: 0.5} if name == "caps_temporal" else {name: dict(coef=0.5, std=0.1)}
    off = {name: 0.0} if name == "caps_temporal" else {name: dict(coef=0.0, std=0.1)}
    plain = run(backend="eager")
    assert changed(plain, run(backend="eager", auxiliary_losses=losses)) == "actor"
    assert changed(plain, run(backend="eager", auxiliary_losses=off)) == ""
    assert f"train/{name}_loss" not in logged(run(auxiliary_losses=off, backend="native"))


def test_what_does_not_fit():
    """Observations without floats, and rollouts of one step, are refused."""
    with pytest.raises(ValueError, match=r"`auxiliary_losses\['caps_spatial'\]=.*no floats"):
        make(
            policy="CnnPolicy",
            env_kwargs=dict(observation_space=IMAGE),
            auxiliary_losses=dict(caps_spatial=dict(coef=1, std=1)),
        )
    with pytest.raises(ValueError, match=r"`auxiliary_losses=.*n_steps=1"):
        make(n_steps=1, batch_size=2, auxiliary_losses=dict(caps_temporal=1.0))
