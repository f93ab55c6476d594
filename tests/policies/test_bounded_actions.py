"""Policies with bounded action distributions: what the environment gets, what the buffer holds, what is learned and logged."""

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import DummyVecEnv
from support.policies import BOUNDED, POLICIES, SCHEDULE, SMALL, make, saturate
from support.toys import BOX_ACTION, DICT, IMAGE, VECTOR, ToyEnv, make_toys
from support.zips import Zip

from sb3_ppo_ext import MlpPolicy, PPOExt
from sb3_ppo_ext.distributions import parameters, unsquashed_mean
from sb3_ppo_ext.policies.actor_critic import ActionDistributionMixin


@st.composite
def boxes(draw):
    """Draw boxes of any shape, float type and finite bounds, some of them without width."""
    dtype = draw(st.sampled_from([np.float16, np.float32, np.float64]))
    shape = draw(nps.array_shapes(min_dims=1, max_dims=3, max_side=3))
    finite = dict(allow_nan=False, allow_infinity=False)
    one, other = (draw(nps.arrays(dtype, shape, elements=finite)) for _ in range(2))
    return spaces.Box(np.minimum(one, other), np.maximum(one, other), dtype=dtype)


@pytest.mark.filterwarnings("ignore:The action space")
@pytest.mark.filterwarnings("ignore:overflow")
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    space=boxes(),
    action_dist=st.sampled_from(BOUNDED),
    deterministic_action=st.sampled_from(["mean", "mode"]),
    deterministic=st.booleans(),
    size=st.sampled_from([0.0, 1.0, 50.0, 1e4]),
    policy=st.sampled_from(POLICIES),
    seed=st.integers(0, 1000),
)
def test_actions_are_in_the_box(space, action_dist, deterministic_action, deterministic, size, policy, seed):
    """
    Actions of any space, policy and distribution are in the box, deterministic or not, single or in a batch, saturated or not.
    """
    th.manual_seed(seed)
    policy_class, observation_space = policy
    deterministic_action = deterministic_action if action_dist == "beta" else "mean"
    keywords = dict(action_dist=action_dist, deterministic_action=deterministic_action)
    policy = policy_class(observation_space, space, SCHEDULE, net_arch=[4], **keywords)
    saturate(policy, size)
    observation = observation_space.sample()
    action, _ = policy.predict(observation, deterministic=deterministic)
    assert action.dtype == space.dtype
    assert space.contains(action)
    batch = {k: np.stack([v] * 3) for k, v in observation.items()} if isinstance(observation, dict) else [observation] * 3
    actions, _ = policy.predict(batch if isinstance(batch, dict) else np.stack(batch), deterministic=deterministic)
    assert actions.shape == (3, *space.shape)
    assert all(space.contains(each) for each in actions)
    latents, _, log_prob = policy(policy.obs_to_tensor(observation)[0], deterministic)
    assert latents.dtype == th.float32
    assert th.isfinite(log_prob).all()


BOXES = [
    spaces.Box(-1.0, 1.0, (1,), np.float32),
    spaces.Box(np.float64([-3, 0.1]), np.float64([5, 0.2])),
    spaces.Box(-2.0, 1.0, (2, 2), np.float16),
    spaces.Box(0.0, 100.0, (1,), np.float32),
]


class Watcher(BaseCallback):
    """Keeps the actions as callbacks see them, and those of the buffer."""

    def __init__(self):
        super().__init__()
        self.actions = []

    def _on_step(self):
        assert self.locals["actions"] is self.locals["clipped_actions"]
        self.actions.append(self.locals["actions"].copy())
        return True

    def _on_rollout_end(self):
        self.stored = self.model.rollout_buffer.actions.copy()


@pytest.mark.filterwarnings("ignore:The action space")
@pytest.mark.parametrize("space", BOXES, ids=str)
@pytest.mark.parametrize("action_dist", BOUNDED)
def test_training(action_dist, space):
    """Callbacks and environment get actions within the bounds; the buffer holds float32 latents that give exactly these."""
    watcher = Watcher()
    model = make(action_dist, space).learn(32, callback=watcher)
    assert watcher.stored.dtype == np.float32
    actions = np.stack(watcher.actions)
    assert actions.dtype == space.dtype
    latents = watcher.stored.reshape(actions.shape)
    np.testing.assert_array_equal(model.policy.unscale_action(latents), actions)
    assert np.unique(actions).size > 20


@pytest.mark.parametrize(("name", "observation_space"), [("CnnPolicy", IMAGE), ("MultiInputPolicy", DICT)])
@pytest.mark.parametrize("action_dist", BOUNDED)
def test_images_and_dictionaries(action_dist, name, observation_space):
    """Policies of images and dictionaries train by their names, also with a features extractor for each network."""
    env = make_toys(observation_space=observation_space)
    model = make(action_dist, env=env, policy=name, policy_kwargs=dict(share_features_extractor=False)).learn(32)
    assert isinstance(model.policy, ActionDistributionMixin)
    assert type(model.policy).__name__ == name


@pytest.mark.parametrize(
    ("action_dist", "size"),
    [
        ("gaussian", 0.0),
        ("gaussian", 8.0),
        ("squashed_gaussian", 0.0),
        ("squashed_gaussian", 8.0),
        ("beta", 0.0),
        ("beta", 50.0),
    ],
)
def test_first_ratio_is_one(action_dist, size):
    """Before the first step the ratio of each sample is 1, at saturation too."""

    class Recorded(PPOExt):
        deviation = 0.0

        def extra_actor_loss(self, rollout_data, distribution):
            log_ratio = distribution.log_prob(rollout_data.actions) - rollout_data.old_log_prob
            self.deviation = max(self.deviation, (log_ratio.exp() - 1).abs().max().item())
            return 0.0, {}

    model = Recorded(
        "MlpPolicy", make_toys(), n_steps=128, batch_size=64, n_epochs=1, learning_rate=0.0, action_dist=action_dist
    )
    saturate(model.policy, size)
    model.learn(256)
    assert 0 <= model.deviation < 1e-5
    if action_dist != "gaussian" and size > 0:
        assert model.logger.name_to_value["train/mass_near_bounds"] > 0.2


@pytest.mark.parametrize("action_dist", BOUNDED)
def test_action_that_is_not_finite(action_dist):
    """An action that is not finite is refused before it gets to the environment."""
    model = make(action_dist)
    with th.no_grad():
        model.policy.action_net.bias.fill_(float("nan"))
    with pytest.raises(ValueError, match="2 of 2 numbers in the policy's actions are not finite"):
        model.predict(np.zeros(3, np.float32), deterministic=True)
    with pytest.raises(ValueError, match="1 of 4 numbers in the policy's actions are not finite"):
        model.policy.unscale_action(np.float32([[0.1, 0.2], [0.3, np.nan]]))
    with pytest.raises(ValueError, match="not finite"):
        model.learn(32)


@pytest.mark.filterwarnings("ignore:The action space")
@pytest.mark.parametrize("action_dist", BOUNDED)
def test_actions_to_latents(action_dist):
    """The latents of an expert's actions give these actions back."""
    space = spaces.Box(np.float32([[-1, 100], [-4, 2]]), np.float32([[1, 101], [5, 2]]))
    policy = MlpPolicy(VECTOR, space, SCHEDULE, action_dist=action_dist)
    actions = np.stack([space.sample() for _ in range(10)])
    latents = policy.scale_action(actions)
    assert latents.dtype == np.float32
    np.testing.assert_allclose(policy.unscale_action(latents), actions, rtol=1e-5, atol=1e-5)
    flat = spaces.Box(np.float16([-6e4, 3]), np.float16([6e4, 3]), dtype=np.float16)
    policy_of_flat = MlpPolicy(VECTOR, flat, SCHEDULE, action_dist=action_dist)
    actions = np.float16([[-3e4, 3], [0, 3]])
    np.testing.assert_allclose(policy_of_flat.unscale_action(policy_of_flat.scale_action(actions)), actions, atol=40)
    np.testing.assert_allclose(policy_of_flat.action_dist.position(policy_of_flat.scale_action(actions))[:, 1], 0.5)
    widest = np.finfo(np.float64).max
    policy_of_widest = MlpPolicy(VECTOR, spaces.Box(-widest, widest, (1,), np.float64), SCHEDULE, action_dist=action_dist)
    middle = policy_of_widest.action_dist.latents(np.float64([[0.5]]))
    assert policy_of_widest.unscale_action(middle) == 0
    edges = policy.scale_action(np.stack([space.low, space.high]))
    assert np.isfinite(edges).all()
    np.testing.assert_allclose(policy.unscale_action(edges), [space.low, space.high], atol=1e-4)


def test_deterministic_action():
    """The deterministic action is the image of the mean; of Beta the mean, or the mode on request, also by `load`."""
    observation = np.float32([0.3, -0.2, 0.9])
    model = make("squashed_gaussian")
    saturate(model.policy, 2.0)
    mean = unsquashed_mean(model.policy.get_distribution(th.as_tensor(observation)[None])).detach().numpy()[0]
    low, high = BOX_ACTION.low, BOX_ACTION.high
    expected = low + (high - low) * (np.tanh(mean) + 1) / 2
    np.testing.assert_allclose(model.predict(observation, deterministic=True)[0], expected, rtol=1e-5)
    model = make("beta")
    saturate(model.policy, 2.0)
    saved = Zip(model)
    alpha, beta = parameters(model.policy.get_distribution(th.as_tensor(observation)[None])).detach().numpy()[0].reshape(2, 2)
    for name, position in {"mean": alpha / (alpha + beta), "mode": (alpha - 1) / (alpha + beta - 2)}.items():
        loaded = saved.load(deterministic_action=name)
        expected = low + (high - low) * position
        np.testing.assert_allclose(loaded.predict(observation, deterministic=True)[0], expected, rtol=1e-4)


def test_initial_policies():
    """A new Beta is nearly uniform and a new squashed Gaussian unsaturated, with and without the orthogonal initialisation."""
    for ortho_init in (True, False):
        model = make("beta", policy_kwargs=dict(ortho_init=ortho_init), ent_coef=0.0, learning_rate=0.0).learn(32)
        assert -2 * np.log(2) <= model.logger.name_to_value["train/entropy_loss"] < -2 * np.log(2) + 0.1
        assert 2 < model.logger.name_to_value["train/concentration"] < 3.2
        model = make("squashed_gaussian", policy_kwargs=dict(ortho_init=ortho_init), learning_rate=0.0).learn(32)
        assert model.logger.name_to_value["train/mass_near_bounds"] < 0.05


class NoReward(ToyEnv):
    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, 0.0, *rest


@pytest.mark.slow
@pytest.mark.parametrize("action_dist", BOUNDED)
def test_entropy_bonus_leads_to_the_uniform_distribution(action_dist):
    """The entropy bonus makes a policy at the bounds, and a narrow one, uniform."""
    for start in (1.5, -2.0) if action_dist == "squashed_gaussian" else (8.0, 30.0):
        options = dict(ent_coef=1.0, learning_rate=0.02, n_epochs=10, normalize_advantage=False)
        if action_dist == "squashed_gaussian":
            options["policy_kwargs"] = dict(log_std_init=start)
        model = make(action_dist, env=DummyVecEnv([NoReward] * 2), **options)
        if action_dist == "beta":
            with th.no_grad():
                model.policy.action_net.bias.copy_(th.tensor([start, start, -3.0, 5.0]))
        before = entropy(model)
        after = entropy(model.learn(640))
        assert before < 2 * np.log(2) - 0.2
        assert after > 2 * np.log(2) - 0.1


def entropy(model):
    with th.no_grad():
        return model.policy.get_distribution(th.zeros(1, 3)).entropy().item()


def test_bounds_loss_acts_before_the_squashing():
    """The bounds loss pulls back a mean that is far out, where tanh alone leaves hardly any gradient."""
    means = {}
    for coefficient in (0.0, 1.0):
        model = make("squashed_gaussian", bounds_coef=coefficient, learning_rate=0.02, n_epochs=10, vf_coef=0.0)
        with th.no_grad():
            model.policy.action_net.bias.copy_(th.tensor([6.0, -6.0]))
        model.learn(320)
        means[coefficient] = unsquashed_mean(model.policy.get_distribution(th.zeros(1, 3))).abs()
    assert means[0.0].min() > 4
    assert means[1.0].max() < 2


def test_what_is_logged():
    """Each action distribution logs its own statistics; the share of clipped actions is logged for the Gaussian alone."""
    logs = {action_dist: make(action_dist).learn(32).logger.name_to_value for action_dist in ["gaussian", *BOUNDED]}
    keys = ("train/std", "train/mass_near_bounds", "train/concentration", "train/actions_at_bounds")
    found = {action_dist: [key in log for key in keys] for action_dist, log in logs.items()}
    assert found["gaussian"] == [True, False, False, True]
    assert found["squashed_gaussian"] == [True, True, False, False]
    assert found["beta"] == [False, True, True, False]
    assert all("train/entropy_loss" in log for log in logs.values())
    assert logs["squashed_gaussian"]["train/std"] == pytest.approx(1, abs=0.1)


def test_optimizer_of_beta():
    """The optimiser of Beta's policy has the learning rate and the arguments that SB3 gives to its own."""
    ours, theirs = (
        MlpPolicy(VECTOR, BOX_ACTION, LinearSchedule(1e-3, 0.0, 1.0), action_dist="beta"),
        PPO("MlpPolicy", ToyEnv()),
    )
    assert ours.optimizer.defaults["eps"] == theirs.policy.optimizer.defaults["eps"] == 1e-5
    assert ours.optimizer.defaults["lr"] == 1e-3
    kwargs = dict(action_dist="beta", optimizer_class=th.optim.SGD, optimizer_kwargs=dict(momentum=0.3))
    other = MlpPolicy(VECTOR, BOX_ACTION, SCHEDULE, **kwargs)
    assert type(other.optimizer) is th.optim.SGD
    assert other.optimizer.defaults["momentum"] == 0.3
    assert {p for group in other.optimizer.param_groups for p in group["params"]} == set(other.parameters())


def test_output_layer_of_beta():
    """
    The output layer is orthogonal with a gain of 0.01, as SB3's, unless the user wants none of it; alpha = beta = 1.31 at
    first.
    """
    for ortho_init, low, high in [(True, 0.0099, 0.0101), (False, 0.05, 1.0)]:
        policy = MlpPolicy(VECTOR, BOX_ACTION, SCHEDULE, action_dist="beta", ortho_init=ortho_init)
        norms = policy.action_net.weight.norm(dim=1)
        assert ((norms > low) & (norms < high)).all()
        assert (policy.action_net.bias == -1).all()
    distribution = MlpPolicy(VECTOR, BOX_ACTION, SCHEDULE, action_dist="beta").get_distribution(th.zeros(1, 3))
    np.testing.assert_allclose(parameters(distribution).detach(), 1.31, atol=0.01)


def test_statistics_are_of_the_last_epoch():
    """Statistics are of each sample once, in the last epoch, as the KL divergence."""
    model = make("beta", n_epochs=3)
    seen = []
    model.policy.action_dist.statistics = lambda parameters: seen.append(len(parameters)) or {}
    model.learn(32)
    assert seen == [32]


@pytest.mark.parametrize("action_dist", BOUNDED)
def test_no_statistics_without_a_step(action_dist):
    """If every minibatch was left out, the share of clipped actions is not computed of latents."""

    class Bad(PPOExt):
        def extra_actor_loss(self, rollout_data, distribution):
            return th.tensor(float("nan")), {}

    model = Bad("MlpPolicy", make_toys(), action_dist=action_dist, bad_gradients="skip", **SMALL).learn(32)
    assert "train/actions_at_bounds" not in model.logger.name_to_value
