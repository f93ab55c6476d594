"""Mirror symmetry: a policy that is its own mirror image has no mirror loss, and learns the same from mirrored samples."""

import copy

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize
from support.cases import one_in
from support.masks import make_masked
from support.toys import DICT, IMAGE, make_toys
from support.training import BOTH, changed, logged, make, run

from sb3_ppo_ext import ActionMaskWrapper, Mirror, PPOExt
from sb3_ppo_ext.distributions import location
from sb3_ppo_ext.losses import mirror_loss

SQUARE = spaces.Box(-1.0, 1.0, (2,), np.float32)
OBS = [0, [1, -1], [2, -1]]
R_OBS = np.diag([1.0, -1.0, -1.0])
SMALL = dict(n_steps=16, batch_size=8, n_epochs=2, seed=3, device="cpu", backend="eager")
# Action space and mirror image of an action; reflection of the outputs of the policy's last layer, written by hand
SWAPPED = np.array([[0, 1.0], [1.0, 0]])
ACTIONS = {
    "Gaussian": (dict(action_space=SQUARE), {}, [[0, -1], 1], np.diag([-1.0, 1.0])),
    "Gaussian, swapped": (dict(action_space=SQUARE), {}, [[1, -1], [0, -1]], -SWAPPED),
    "gSDE": (dict(action_space=SQUARE), dict(use_sde=True), [[0, -1], 1], np.diag([-1.0, 1.0])),
    "squashed": (dict(action_space=SQUARE), dict(action_dist="squashed_gaussian"), [[1, -1], [0, -1]], -SWAPPED),
    # The outputs are alpha and beta of both actions; the mirror image of Beta(alpha, beta) is Beta(beta, alpha).
    "Beta": (
        dict(action_space=SQUARE),
        dict(action_dist="beta"),
        [[0, -1], 1],
        np.array([[0, 0, 1.0, 0], [0, 1.0, 0, 0], [1.0, 0, 0, 0], [0, 0, 0, 1.0]]),
    ),
    "Discrete": (dict(action_space=spaces.Discrete(3)), {}, [0, 2, 1], np.eye(3)[[0, 2, 1]]),
    # Two actions with two choices change places, and the choices of the third one are turned around.
    "MultiDiscrete": (
        dict(action_space=spaces.MultiDiscrete([2, 2, 3])),
        {},
        [2, 3, 0, 1, 6, 5, 4],
        np.eye(7)[[2, 3, 0, 1, 6, 5, 4]],
    ),
    "MultiBinary": (
        dict(action_space=spaces.MultiBinary(3)),
        {},
        [1, 0, [2, -1]],
        np.array([[0, 1.0, 0], [1, 0, 0], [0, 0, -1]]),
    ),
}


def losses_of(action, obs=OBS, coef=0.5):
    return {name: dict(coef=coef, obs=obs, action=action) for name in ("mirror", "mirror_augmentation")}


def symmetric(policy, r_action):
    """Make a linear policy with some random weights its own mirror image."""
    r_obs, r_action = (th.as_tensor(matrix, dtype=th.float32) for matrix in (R_OBS, r_action))
    with th.no_grad():
        for layer, reflection in ((policy.action_net, r_action), (policy.value_net, th.eye(1))):
            layer.weight.copy_(th.randn_like(layer.weight))
            layer.bias.copy_(th.randn_like(layer.bias))
            layer.weight.copy_((layer.weight + reflection @ layer.weight @ r_obs) / 2)
            layer.bias.copy_((layer.bias + reflection @ layer.bias) / 2)


def test_mirror_loss():
    """The mean over samples of the squared distance, summed over the actions."""
    assert mirror_loss(th.tensor([[1.0, 2.0], [0.0, 0.0]]), th.tensor([[0.0, 0.0], [0.0, 4.0]])).item() == (1 + 4 + 16) / 2
    first, second = (th.randn(4, 3, dtype=th.float64, requires_grad=True) for _ in range(2))
    assert th.autograd.gradcheck(mirror_loss, (first, second))


def test_mirror_loss_by_hand():
    """A linear policy a = 2 x + 3 y + 1 with the mirror image y -> -y, a -> -a: the loss is the mean of (4 x + 2)^2."""
    env = dict(action_space=spaces.Box(-1, 1, (1,), np.float32))
    losses = dict(mirror=dict(coef=0.5, obs=[0, [1, -1], 2], action=[[0, -1]]))
    model = make(env_kwargs=env, policy_kwargs=dict(net_arch=[]), learning_rate=0.0, auxiliary_losses=losses)
    with th.no_grad():
        model.policy.action_net.weight.copy_(th.tensor([[2.0, 3.0, 0.0]]))
        model.policy.action_net.bias.fill_(1.0)
    model.learn(32)
    x = model.rollout_buffer.observations[:, 0]
    assert logged(model)["train/mirror_loss"] == pytest.approx(np.mean((4 * x + 2) ** 2), rel=1e-5)


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("name", ACTIONS)
def test_symmetric_policies(name):
    """
    A policy that is its own mirror image has no mirror loss, and the loss of its mirrored samples is PPO's: they have the same
    probabilities and values. Another policy has one.
    """
    env, options, action, r_action = ACTIONS[name]
    given = dict(policy_kwargs=dict(net_arch=[]), auxiliary_losses=losses_of(action), ent_coef=0.1, learning_rate=0.0)
    model = PPOExt("MlpPolicy", make_toys(**env), **SMALL, **given, **options)
    th.manual_seed(0)
    symmetric(model.policy, r_action)
    model.learn(32)
    log = logged(model)
    assert log["train/mirror_loss"] == pytest.approx(0, abs=1e-9)
    expected = log["train/policy_gradient_loss"] + 0.1 * log["train/entropy_loss"] + 0.5 * log["train/value_loss"]
    assert log["train/mirror_augmentation_loss"] == pytest.approx(expected, rel=1e-4)
    with th.no_grad():
        model.policy.action_net.weight[0, 0] += 0.5
        model.policy.action_net.weight[0, 1] += 0.5
    model.learn(32)
    assert logged(model)["train/mirror_loss"] > 1e-4


def mirror_of(model, action, obs=OBS, **kwargs):
    return Mirror(model.policy, obs, action, **kwargs)


SAMPLES = {
    "Gaussian": ([[0.5, 3.0]], [[-0.5, 3.0]]),
    "squashed": ([[0.5, 3.0]], [[-3.0, -0.5]]),
    "Beta": ([[0.2, 0.9]], [[0.8, 0.9]]),
    "Discrete": ([0, 1, 2], [0, 2, 1]),
    "MultiDiscrete": ([[0.0, 1.0, 2.0], [1.0, 1.0, 1.0]], [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]]),
    "MultiBinary": ([[1.0, 0.0, 0.0]], [[0.0, 1.0, 1.0]]),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_mirrored_samples(name):
    """Mirror images of actions as the rollout buffer has them."""
    env, options, action, _ = ACTIONS[name]
    mirror = mirror_of(PPOExt("MlpPolicy", make_toys(**env), **SMALL, **options), action)
    samples, expected = (th.tensor(part) for part in SAMPLES[name])
    mirrored = mirror.actions.of_samples(samples)
    th.testing.assert_close(mirrored, expected)
    th.testing.assert_close(mirror.actions.of_samples(mirrored), samples)


def test_augmentation_by_hand():
    """The loss of mirrored samples with the probabilities and advantages of the originals, computed sample by sample."""
    losses = dict(mirror_augmentation=dict(coef=0.7, obs=OBS, action=[[0, -1], 1]))
    options = dict(n_epochs=1, batch_size=32, learning_rate=0.0, ent_coef=0.01, clip_range=0.1, normalize_advantage=False)
    model = PPOExt("MlpPolicy", make_toys(action_space=SQUARE), **{**SMALL, **options}, auxiliary_losses=losses)
    with th.no_grad():
        model.policy.action_net.bias.copy_(th.tensor([0.4, 0.1]))
    model.learn(32)
    buffer, policy, total = model.rollout_buffer, model.policy, 0.0
    entropies = []
    for row in range(32):
        observation = th.as_tensor(buffer.observations[row] * [1, -1, -1], dtype=th.float32)[None]
        action = th.as_tensor(buffer.actions[row] * [-1, 1], dtype=th.float32)[None]
        with th.no_grad():
            value, log_prob, entropy = policy.evaluate_actions(observation, action)
        ratio = np.exp(log_prob.item() - buffer.log_probs[row].item())
        advantage = buffer.advantages[row].item()
        total -= min(ratio * advantage, np.clip(ratio, 0.9, 1.1) * advantage)
        total += 0.5 * (buffer.returns[row].item() - value.item()) ** 2
        entropies.append(entropy.item())
    expected = total / 32 - 0.01 * np.mean(entropies)
    assert logged(model)["train/mirror_augmentation_loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.integration
def test_probability_of_a_mirrored_sample():
    """
    Mirrored actions of the mirrored policy have the density that the originals have: importance sampling with it is unbiased,
    whatever the policy.
    """
    th.manual_seed(0)
    model = PPOExt("MlpPolicy", make_toys(action_space=SQUARE), **SMALL)
    with th.no_grad():
        model.policy.action_net.bias.copy_(th.tensor([0.4, 0.1]))
        observation, mirror = th.tensor([[0.3, 0.2, -0.5]]), mirror_of(model, [[0, -1], 1])
        old = model.policy.get_distribution(observation.repeat(200_000, 1))
        actions = old.get_actions()
        old_log_prob, mirrored = old.log_prob(actions), mirror.actions.of_samples(actions)
        new = model.policy.get_distribution(mirror.of_observations(observation).repeat(200_000, 1))
        ratio = th.exp(new.log_prob(mirrored) - old_log_prob)
        # The mean of a function of the action under the policy at the mirrored observation
        expected = new.distribution.mean[0]
    np.testing.assert_allclose((ratio[:, None] * mirrored).mean(dim=0), expected, atol=0.02)
    assert ratio.mean().item() == pytest.approx(1, abs=0.01)
    assert ratio.std() > 0.3


# Observations


def test_normalized_observations():
    """The mirror image is that of the observation before `VecNormalize`, whatever its statistics are."""
    env = VecNormalize(make_toys(action_space=SQUARE), norm_reward=False)
    env.obs_rms.mean, env.obs_rms.var = np.array([0.1, 0.2, -0.3]), np.array([0.5, 1.0, 2.0])
    mirror = mirror_of(PPOExt("MlpPolicy", env, **SMALL), [0, 1], normalizer=env)
    raw = np.random.default_rng(0).uniform(-1, 1, (5, 3)).astype(np.float32)
    mirrored = mirror.of_observations(th.as_tensor(env.normalize_obs(raw)))
    np.testing.assert_allclose(mirrored, env.normalize_obs(raw * [1, -1, -1]), rtol=1e-4, atol=1e-5)


def test_loss_with_normalized_observations():
    """A training uses the current statistics of `VecNormalize`, also those of mirrored observations."""
    env = VecNormalize(make_toys(action_space=spaces.Box(-1, 1, (1,), np.float32)), norm_reward=False)
    env.obs_rms.mean, env.obs_rms.count = np.array([0.1, 0.8, -0.5]), 50.0
    losses = dict(mirror=dict(coef=1.0, obs=OBS, action=[[0, -1]]))
    model = PPOExt("MlpPolicy", env, auxiliary_losses=losses, **{**SMALL, "learning_rate": 0.0})
    with th.no_grad():
        model.policy.action_net.weight.normal_()
    model.learn(32)
    normalized = model.rollout_buffer.observations
    mirrored = env.normalize_obs(env.unnormalize_obs(normalized) * [1, -1, -1])
    with th.no_grad():
        actions = [model.policy.get_distribution(th.as_tensor(part)).mode().numpy() for part in (normalized, mirrored)]
    assert logged(model)["train/mirror_loss"] == pytest.approx(np.mean((actions[0] + actions[1]) ** 2), rel=1e-4)


def test_stacked_observations():
    """Frames that are stacked after `VecNormalize` cannot be brought back to the units of the environment, and are refused."""
    env = VecFrameStack(VecNormalize(make_toys(action_space=SQUARE)), 2)
    obs = [0, [1, -1], [2, -1], 3, [4, -1], [5, -1]]
    with pytest.raises(ValueError, match=r"`auxiliary_losses\['mirror'\]\['obs'\]=.*outermost wrapper"):
        PPOExt("MlpPolicy", env, auxiliary_losses=losses_of([0, 1], obs), **SMALL)
    env = VecNormalize(VecFrameStack(make_toys(action_space=SQUARE), 2))
    PPOExt("MlpPolicy", env, auxiliary_losses=losses_of([0, 1], obs), **SMALL).learn(32)


VECTORS = spaces.Dict({"joints": spaces.Box(-1, 1, (2, 2), np.float32), "gear": spaces.Discrete(3), "camera": IMAGE})


@pytest.mark.parametrize("normalize", [False, True])
def test_dictionaries(normalize):
    """Each part has its own mirror image, of any shape; `None` leaves it as it is."""
    env = make_toys(observation_space=VECTORS, action_space=SQUARE)
    env = VecNormalize(env, norm_obs_keys=["joints"]) if normalize else env
    obs = dict(joints=[1, 0, [2, -1], 3], gear=None, camera=None)
    model = PPOExt("MultiInputPolicy", env, auxiliary_losses=losses_of([0, 1], obs), **SMALL).learn(32)
    observation = model.policy.obs_to_tensor({key: np.array([VECTORS[key].sample()]) for key in VECTORS})[0]
    mirrored = mirror_of(model, [0, 1], obs).of_observations(observation)
    (a, b), (c, d) = observation["joints"][0].tolist()
    assert mirrored["joints"][0].tolist() == [[b, a], [-c, d]]
    assert all(th.equal(mirrored[key], observation[key]) for key in ("gear", "camera"))


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("space", [spaces.Discrete(5), spaces.MultiDiscrete([3, 2, 4]), spaces.MultiBinary(3)], ids=str)
@pytest.mark.parametrize("wrapper", [None, ActionMaskWrapper])
def test_masks_are_mirrored(space, wrapper):
    """The mask of the mirrored observation is that of the mirrored actions, so that these are valid."""
    actions = {"Discrete": [1, 0, 2, 3, 4], "MultiDiscrete": [2, 1, 0, 3, 4, 8, 7, 6, 5], "MultiBinary": [1, 0, [2, -1]]}
    action = actions[type(space).__name__]
    key = None if wrapper is None else "action_mask"
    obs = OBS if wrapper is None else dict(observation=OBS)
    for each in (obs, OBS):
        model = PPOExt(
            "MlpPolicy",
            make_masked(wrapper=wrapper, action_space=space),
            action_masking=True,
            action_mask_key=key,
            auxiliary_losses=losses_of(action, each),
            **SMALL,
        )
        model.learn(32)
        data = next(model.rollout_buffer.get(32))
        mirror = mirror_of(model, action, each)
        mirrored = mirror.of_observations(data.observations)
        samples = data.actions.long().flatten() if isinstance(space, spaces.Discrete) else data.actions
        with th.no_grad():
            _, log_prob, _ = model.policy.evaluate_actions(mirrored, mirror.actions.of_samples(samples))
            _, of_originals, _ = model.policy.evaluate_actions(mirrored, samples)
        assert (log_prob > -50).all()
        assert (of_originals < -50).any()
        assert th.isfinite(th.tensor(logged(model)["train/mirror_augmentation_loss"]))


MEMORIES = [name for name in ACTIONS if name != "gSDE"]
TRANSFORMER = dict(context_length=4, d_model=8, n_heads=2, use_last_action=True, use_last_reward=True)


@pytest.mark.integration
@pytest.mark.parametrize("case", one_in(8, [(backend, name) for backend in ("eager", "device") for name in MEMORIES]))
def test_policies_with_a_transformer(case):
    """The whole history is mirrored, with the last actions: the loss makes the policy its own mirror image."""
    backend, name = case
    env, options, action, _ = ACTIONS[name]
    given = dict(policy_kwargs=TRANSFORMER, backend=backend, learning_rate=3e-3, n_epochs=8, batch_size=16)
    losses = dict(mirror=dict(coef=20.0, obs=OBS, action=action))
    model = PPOExt("MlpTransformerPolicy", make_toys(**env), auxiliary_losses=losses, **{**SMALL, **given}, **options)
    with th.no_grad():
        model.policy.action_net.weight.normal_(std=0.5)
    model.learn(32)
    first = logged(model)["train/mirror_loss"]
    model.learn(32 * 12)
    assert logged(model)["train/mirror_loss"] < 0.2 * first
    rollout = model._rollout()
    sequences = rollout.samples(th.arange(5)).observations
    mirror = mirror_of(model, action)
    twice = mirror.of_observations(mirror.of_observations(sequences))
    th.testing.assert_close(twice.last_actions, sequences.last_actions)
    assert not th.equal(mirror.of_observations(sequences).last_actions, sequences.last_actions)


def test_recurrent_policies_are_refused():
    """The states of an LSTM are not those of mirrored observations."""
    with pytest.raises(ValueError, match=r"`auxiliary_losses\['mirror'\]=.*LstmPolicy is recurrent.*transformer"):
        PPOExt("MlpLstmPolicy", make_toys(action_space=SQUARE), auxiliary_losses=losses_of([0, 1]), **SMALL)


# What the losses do


@pytest.mark.parametrize("name", ["mirror", "mirror_augmentation"])
def test_what_changes(name):
    """The mirror loss changes the actor, the augmentation the critic as well; the coefficient 0 changes nothing."""
    env = dict(action_space=SQUARE)
    plain = run(env_kwargs=env, backend="eager")
    for coef, expected in ((0.5, "actor" if name == "mirror" else BOTH), (0.0, "")):
        losses = {name: dict(coef=coef, obs=OBS, action=[[0, -1], 1])}
        assert changed(plain, run(env_kwargs=env, backend="eager", auxiliary_losses=losses)) == expected


def test_weights_of_segments():
    """With prioritised segments, mirrored samples have the weights of the originals."""
    env, options, action, r_action = ACTIONS["Gaussian"]
    given = dict(policy_kwargs=dict(net_arch=[]), auxiliary_losses=losses_of(action), learning_rate=0.0)
    given |= dict(priority_alpha=1.0, priority_beta=0.9, priority_segment=4)
    model = PPOExt("MlpPolicy", make_toys(**env), **SMALL, **given, **options)
    symmetric(model.policy, r_action)
    log = logged(model.learn(32))
    expected = log["train/policy_gradient_loss"] + 0.5 * log["train/value_loss"]
    assert log["train/mirror_augmentation_loss"] == pytest.approx(expected, rel=1e-4)


def test_location_is_the_deterministic_action():
    """What is compared is what `predict` returns, in units of the bounds if they cannot be left."""
    for name in ("Gaussian", "squashed", "Beta", "gSDE"):
        env, options, *_ = ACTIONS[name]
        model = PPOExt("MlpPolicy", make_toys(**env), **SMALL, **options)
        observation = np.array([[0.5, 0.2, -0.4]], np.float32)
        with th.no_grad():
            found = location(model.policy.get_distribution(th.as_tensor(observation)))
        np.testing.assert_allclose(found, model.predict(observation, deterministic=True)[0], atol=1e-5)


BAD = [
    (dict(obs=[0, 1]), r"\['obs'\]=\[0, 1\].*2 elements, and the observation 3"),
    (dict(obs=dict(joints=[0])), r"\['obs'\]=.*give a list"),
    (dict(action=[0]), r"\['action'\]=\[0\].*1 elements.*2 numbers"),
    (dict(action=dict(matrix=[[1.0, 0], [0, 1]])), r"\['action'\]=.*independent of each other"),
    (dict(env=dict(action_space=spaces.Box(0, 1, (2,), np.float32))), r"\['action'\]=.*other bounds"),
    (dict(env=dict(action_space=spaces.Discrete(2))), r"\['action'\]=.*a choice has no sign"),
    (dict(env=dict(action_space=spaces.Discrete(3))), r"\['action'\]=.*3 choices"),
    (dict(env=dict(action_space=spaces.MultiDiscrete([2, 2])), action=[0, 2, 1, 3]), r"choices of one action"),
    (dict(env=dict(observation_space=spaces.Discrete(3))), r"\['obs'\]=.*no vector of numbers"),
    (dict(env=dict(observation_space=IMAGE), policy="CnnPolicy"), r"\['obs'\]=.*no vector of numbers"),
    (dict(env=dict(observation_space=DICT), policy="MultiInputPolicy"), r"\['obs'\]=.*'camera', 'gear', 'joints'"),
    (
        dict(env=dict(observation_space=DICT), policy="MultiInputPolicy", obs=dict(joints=OBS)),
        r"\['obs'\]=.*'camera', 'gear', 'joints', None for what stays",
    ),
]


@pytest.mark.parametrize(("given", "message"), BAD, ids=[message for _, message in BAD])
def test_what_does_not_fit(given, message):
    """A mirror image that does not fit the spaces is refused by name, before the training."""
    given = copy.deepcopy(given)
    env, policy = {"action_space": SQUARE, **given.pop("env", {})}, given.pop("policy", "MlpPolicy")
    losses = dict(mirror=dict(coef=0.5, **{"obs": OBS, "action": [[0, -1], 1], **given}))
    with pytest.raises(ValueError, match=r"`auxiliary_losses\['mirror'\].*" + message):
        PPOExt(policy, make_toys(**env), auxiliary_losses=losses, **SMALL)
