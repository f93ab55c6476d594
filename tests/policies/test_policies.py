"""
Policies with bounded action distributions: what the environment gets, what the buffer holds, what is saved; and the Gaussian's
switches.
"""

import subprocess
import sys
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps
from sb3_contrib import TRPO
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.utils import ConstantSchedule, LinearSchedule
from support.parity import assert_equal
from support.toys import BOX_ACTION, DICT, IMAGE, VECTOR, RolloutRecorder, ToyEnv, make_toys
from support.zips import Zip

import sb3_ppo_ext
from sb3_ppo_ext import CnnPolicy, MlpPolicy, MultiInputPolicy, PPOExt
from sb3_ppo_ext.distributions import parameters, unsquashed_mean
from sb3_ppo_ext.policies.actor_critic import ActionDistributionMixin

BOUNDED = ["squashed_gaussian", "beta"]
SMALL = dict(n_steps=16, batch_size=8, n_epochs=2, seed=0, device="cpu", policy_kwargs=dict(net_arch=[8, 8]))
SCHEDULE = ConstantSchedule(3e-4)
# A policy by itself gets images with the channels first.
CHANNELS_FIRST = spaces.Box(0, 255, (1, 36, 36), np.uint8)
DICTIONARY = spaces.Dict({**DICT.spaces, "camera": CHANNELS_FIRST})
POLICIES = [(MlpPolicy, VECTOR), (CnnPolicy, CHANNELS_FIRST), (MultiInputPolicy, DICTIONARY)]


def make(action_dist="gaussian", action_space=BOX_ACTION, env=None, policy="MlpPolicy", policy_kwargs=None, **options):
    policy_kwargs = {**SMALL["policy_kwargs"], **(policy_kwargs or {})}
    env = env or make_toys(action_space=action_space)
    return PPOExt(policy, env, action_dist=action_dist, **{**SMALL, **options, "policy_kwargs": policy_kwargs})


def saturate(policy, size):
    """Let its head put out numbers of about this size, of either sign, which depend on the observation."""
    head = policy.action_net
    with th.no_grad():
        head.weight.normal_(0.0, size / 10)
        # Of Beta the first half are those of alpha.
        signs = th.tensor([1.0, -1.0]).repeat(len(head.bias))[: policy.action_dist.action_dim]
        head.bias.copy_(size * th.cat([signs, -signs])[: len(head.bias)])


# Bounded by construction


@st.composite
def boxes(draw):
    """Of any shape, float type and finite bounds, some of them without width."""
    dtype = draw(st.sampled_from([np.float16, np.float32, np.float64]))
    shape = draw(nps.array_shapes(min_dims=1, max_dims=3, max_side=3))
    finite = dict(allow_nan=False, allow_infinity=False)
    one, other = (draw(nps.arrays(dtype, shape, elements=finite)) for _ in range(2))
    return spaces.Box(np.minimum(one, other), np.maximum(one, other), dtype=dtype)


@pytest.mark.filterwarnings("ignore:The action space")
@pytest.mark.filterwarnings("ignore:overflow")
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
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
    """Of any space, policy and action distribution, deterministic or not, single or in a batch, saturated or not."""
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
    """Keeps the actions as callbacks see them, and the buffer's."""

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
    """The environment checks each action. Callbacks see it as it is; the buffer holds latents, float32, that give just it."""
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
    """By name; with a features extractor of its own for each network."""
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
    """Before the first step of the optimiser, for each sample: what was stored is what is evaluated, at saturation too."""

    class Recorded(PPOExt):
        deviation = 0.0

        def extra_actor_loss(self, rollout_data, distribution):
            log_ratio = distribution.log_prob(rollout_data.actions) - rollout_data.old_log_prob
            self.deviation = max(self.deviation, (log_ratio.exp() - 1).abs().max().item())
            return 0.0, {}

    model = Recorded(
        "MlpPolicy", make_toys(), n_steps=512, batch_size=64, n_epochs=1, learning_rate=0.0, action_dist=action_dist
    )
    saturate(model.policy, size)
    model.learn(1024)
    assert 0 <= model.deviation < 1e-5
    if action_dist != "gaussian" and size > 0:
        assert model.logger.name_to_value["train/mass_near_bounds"] > 0.2


@pytest.mark.parametrize("action_dist", BOUNDED)
def test_same_seed_same_policy(action_dist):
    """Also across the boundary between rollouts."""
    one, other = (make(action_dist).learn(64) for _ in range(2))
    assert_equal(one.policy.state_dict(), other.policy.state_dict(), "policy")


@pytest.mark.parametrize("action_dist", BOUNDED)
def test_action_that_is_not_finite(action_dist):
    """It does not get to the environment."""
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
    """For the actions of an expert: their latents give them back."""
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
    """The image of the mean; for Beta the mean, or the mode on request, also when the request comes later, with the zip."""
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
    """Near uniform for Beta, unsaturated for the squashed Gaussian, with and without the orthogonal initialisation."""
    for ortho_init in (True, False):
        model = make("beta", policy_kwargs=dict(ortho_init=ortho_init), ent_coef=0.0, learning_rate=0.0).learn(32)
        assert -2 * np.log(2) <= model.logger.name_to_value["train/entropy_loss"] < -2 * np.log(2) + 0.1
        assert 2 < model.logger.name_to_value["train/concentration"] < 3.2
        model = make("squashed_gaussian", policy_kwargs=dict(ortho_init=ortho_init), learning_rate=0.0).learn(32)
        assert model.logger.name_to_value["train/mass_near_bounds"] < 0.05


# What acts on the action distributions


class NoReward(ToyEnv):
    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, 0.0, *rest


@pytest.mark.parametrize("action_dist", BOUNDED)
def test_entropy_bonus_leads_to_the_uniform_distribution(action_dist):
    """From one at the bounds, where the entropy of the Gaussian itself would only go on growing, and from a narrow one."""
    for start in (1.5, -2.0) if action_dist == "squashed_gaussian" else (8.0, 30.0):
        options = dict(ent_coef=1.0, learning_rate=0.02, n_epochs=10, normalize_advantage=False)
        env = make_toys(vec_env_class=lambda fns: sb3_vec([NoReward] * 2))
        if action_dist == "squashed_gaussian":
            options["policy_kwargs"] = dict(log_std_init=start)
        model = make(action_dist, env=env, **options)
        if action_dist == "beta":
            with th.no_grad():
                model.policy.action_net.bias.copy_(th.tensor([start, start, -3.0, 5.0]))
        before = entropy(model)
        after = entropy(model.learn(640))
        assert before < 2 * np.log(2) - 0.2
        assert after > 2 * np.log(2) - 0.1


def sb3_vec(classes):
    from stable_baselines3.common.vec_env import DummyVecEnv

    return DummyVecEnv(list(classes))


def entropy(model):
    with th.no_grad():
        return model.policy.get_distribution(th.zeros(1, 3)).entropy().item()


def test_bounds_loss_acts_before_the_squashing():
    """It pulls a mean back that is far out, where tanh alone leaves hardly any gradient."""
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
    """Of each action distribution what it has; the share of clipped actions is the Gaussian's alone."""
    logs = {action_dist: make(action_dist).learn(32).logger.name_to_value for action_dist in ["gaussian", *BOUNDED]}
    keys = ("train/std", "train/mass_near_bounds", "train/concentration", "train/actions_at_bounds")
    found = {action_dist: [key in log for key in keys] for action_dist, log in logs.items()}
    assert found["gaussian"] == [True, False, False, True]
    assert found["squashed_gaussian"] == [True, True, False, False]
    assert found["beta"] == [False, True, True, False]
    assert all("train/entropy_loss" in log for log in logs.values())
    assert logs["squashed_gaussian"]["train/std"] == pytest.approx(1, abs=0.1)


# The Gaussian's switches


def test_mean_within_the_bounds():
    """`mean_tanh` bounds the mean to the box, whatever it is; samples are those of a Gaussian, and are clipped."""
    model = make(policy_kwargs=dict(mean_tanh=True, log_std_init=0.5))
    low, high = BOX_ACTION.low, BOX_ACTION.high
    observation = np.float32([0.3, -0.2, 0.9])
    middle = model.predict(observation, deterministic=True)[0]
    np.testing.assert_allclose(middle, (low + high) / 2, atol=0.05)
    linear = model.policy.action_net[0]
    with th.no_grad():
        linear.bias.copy_(th.tensor([0.5, 50.0]))
        linear.weight.zero_()
    expected = [(low[0] + high[0]) / 2 + (high[0] - low[0]) / 2 * np.tanh(0.5), high[1]]
    np.testing.assert_allclose(model.predict(observation, deterministic=True)[0], expected, rtol=1e-6)
    recorder = RolloutRecorder()
    model.learn(32, callback=recorder)
    actions = recorder.rollouts[0]["actions"]
    assert (actions > high).any()
    np.testing.assert_array_equal(np.clip(recorder.steps[0]["actions"], low, high), recorder.steps[0]["clipped_actions"])
    # Another function: parameters of a policy without it do not fit.
    with pytest.raises(RuntimeError, match=r"action_net\.weight"):
        make().set_parameters(model.get_parameters())


@pytest.mark.parametrize("action_dist", ["gaussian", "squashed_gaussian"])
@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_standard_deviation_that_is_not_learned(action_dist, optimizer):
    """It stays where it was put, and everything else learns."""
    fixed = dict(learn_std=False, log_std_init=-1.0)
    model = make(action_dist, policy_kwargs=fixed, optimizer=optimizer, ent_coef=0.1, learning_rate=0.01)
    before = {name: value.clone() for name, value in model.policy.state_dict().items()}
    model.learn(64)
    after = model.policy.state_dict()
    assert th.equal(after["log_std"], th.full((2,), -1.0))
    assert not th.equal(after["action_net.weight"], before["action_net.weight"])
    assert model.logger.name_to_value["train/std"] == pytest.approx(np.exp(-1))


@pytest.mark.parametrize("algorithm", [PPO, PPOExt])
def test_configured_standard_deviation_wins(algorithm):
    """Over that of a zip, in `load` and in `set_parameters`; and a warning says so."""
    kwargs = dict(SMALL, policy_kwargs=dict(net_arch=[8, 8], log_std_init=0.3))
    learned = algorithm("MlpPolicy", make_toys(), **kwargs).learn(64)
    saved = Zip(learned)
    fixed = dict(net_arch=[8, 8], learn_std=False, log_std_init=-1.5)
    with pytest.warns(UserWarning, match=r"stays at exp of `log_std_init=-1\.5` .* is not used"):
        loaded = saved.load(env=make_toys(), device="cpu", policy_kwargs=fixed)
    assert loaded.policy.log_std.tolist() == [-1.5, -1.5]
    assert th.equal(loaded.policy.action_net.weight, learned.policy.action_net.weight)
    loaded.learn(32)
    assert loaded.policy.log_std.tolist() == [-1.5, -1.5]
    other = make(policy_kwargs=fixed)
    with pytest.warns(UserWarning, match="is not used"):
        other.set_parameters(saved.open())
    assert other.policy.log_std.tolist() == [-1.5, -1.5]
    # Its own zip has nothing to say, and what else is in `policy_kwargs` cannot change, as in SB3.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Zip(loaded).load(device="cpu").policy.log_std.tolist() == [-1.5, -1.5]
    for other in (dict(net_arch=[4]), dict(ortho_init=False)):
        with pytest.raises(ValueError, match="policy kwargs"):
            saved.load(policy_kwargs={**fixed, **other})
    with pytest.raises(ValueError, match="policy kwargs"):
        saved.load(policy_kwargs=dict(net_arch=[8, 8], log_std_init=-1.5))


# What is refused

BAD_KEYWORDS = [
    (dict(action_dist="betta"), {}, BOX_ACTION, '`action_dist=\'betta\'`.*"gaussian", "squashed_gaussian" or "beta"'),
    (dict(action_dist=None), {}, BOX_ACTION, "`action_dist=None`"),
    (dict(action_dist="beta", deterministic_action="median"), {}, BOX_ACTION, "`deterministic_action='median'`.*or \"mode\""),
    (dict(action_dist="squashed_gaussian", deterministic_action="mode"), {}, BOX_ACTION, "`deterministic_action='mode'`"),
    (dict(action_dist="beta", use_sde=True), {}, BOX_ACTION, "`action_dist='beta'`.*`use_sde=False`"),
    (dict(action_dist="squashed_gaussian", use_sde=True), {}, BOX_ACTION, "`action_dist='squashed_gaussian'`.*use_sde=False"),
    (dict(use_sde=True), dict(mean_tanh=True), BOX_ACTION, "`mean_tanh=True`.*`use_sde=False`"),
    (dict(use_sde=True), dict(learn_std=False), BOX_ACTION, "`learn_std=False`.*`use_sde=False`"),
    (dict(action_dist="beta"), {}, spaces.Discrete(3), "`action_dist='beta'`.*not a Box"),
    (dict(action_dist="squashed_gaussian"), {}, spaces.MultiBinary(3), "`action_dist='squashed_gaussian'`.*not a Box"),
    ({}, dict(mean_tanh=True), spaces.Discrete(3), "`mean_tanh=True`.*not a Box"),
    ({}, dict(learn_std=False), spaces.MultiDiscrete([2, 2]), "`learn_std=False`.*not a Box"),
    ({}, dict(mean_tanh="yes"), BOX_ACTION, "`mean_tanh='yes'`.*True or False"),
    ({}, dict(learn_std=0.5), BOX_ACTION, r"`learn_std=0\.5`.*True or False"),
    (dict(action_dist="beta"), {}, spaces.Box(0, 10, (2,), np.int64), "`action_dist='beta'`.*integers"),
    (dict(action_dist="beta"), dict(mean_tanh=True), BOX_ACTION, "`mean_tanh=True`.*bounded already"),
    (dict(action_dist="squashed_gaussian"), dict(mean_tanh=True), BOX_ACTION, "`mean_tanh=True`.*bounded already"),
    (dict(action_dist="beta"), dict(learn_std=False), BOX_ACTION, "`learn_std=False`.*no standard deviation"),
    (dict(action_dist="squashed_gaussian"), dict(log_std_init=3.0), BOX_ACTION, r"`log_std_init=3\.0`.*between -5 and 2"),
]


@pytest.mark.parametrize(("options", "policy_kwargs", "space", "message"), BAD_KEYWORDS, ids=str)
def test_bad_action_distribution(options, policy_kwargs, space, message):
    """Of the algorithm and, before anything of it is built, of a policy by itself."""
    with pytest.raises(ValueError, match=message):
        PPOExt("MlpPolicy", ToyEnv(action_space=space), policy_kwargs=policy_kwargs, **options)
    with pytest.raises(ValueError, match=message):
        MlpPolicy(VECTOR, space, SCHEDULE, **options, **policy_kwargs)


BAD_COMBINATIONS = [
    (dict(action_dist="beta", bounds_coef=0.1), {}, r"`bounds_coef=0\.1`.*the mean cannot leave the bounds"),
    (dict(bounds_coef=0.1), dict(mean_tanh=True), r"`bounds_coef=0\.1`.*the mean cannot leave the bounds"),
    ({}, dict(action_dist="beta"), "`action_dist='beta'`.*argument of the algorithm"),
    (dict(action_dist="beta"), dict(deterministic_action="mode"), "`deterministic_action='mode'`.*argument of the algorithm"),
    ({}, dict(mean_tahn=True), "`policy_kwargs` has no option `mean_tahn`: did you mean `mean_tanh`"),
    (dict(action_dist="beta"), dict(net_archi=[8]), "`policy_kwargs` has no option `net_archi`: did you mean `net_arch`"),
]


@pytest.mark.parametrize(("options", "policy_kwargs", "message"), BAD_COMBINATIONS, ids=str)
def test_bad_combination(options, policy_kwargs, message):
    """Options of the algorithm and keywords of the policy that exclude each other are refused."""
    with pytest.raises(ValueError, match=message):
        PPOExt("MlpPolicy", ToyEnv(), policy_kwargs=policy_kwargs, **options)


def test_infinite_bounds():
    """Also for a policy by itself."""
    space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    for action_dist in BOUNDED:
        with pytest.raises(ValueError, match="infinite bound"):
            PPOExt("MlpPolicy", ToyEnv(action_space=space), action_dist=action_dist)
        half_infinite = spaces.Box(-1.0, np.inf, (2,), np.float32)
        for bad in (space, half_infinite):
            with pytest.raises(ValueError, match=r"infinite bound.*finite ones"):
                MlpPolicy(VECTOR, bad, SCHEDULE, action_dist=action_dist)
    with pytest.raises(ValueError, match=r"`mean_tanh=True`.*infinite bound.*finite ones"):
        MlpPolicy(VECTOR, space, SCHEDULE, mean_tanh=True)


@pytest.mark.parametrize(
    ("low", "high", "dimension"),
    [([-1, -1], [1, 60], 1), ([-1, -1, -1], [1, 30, 1], 1), ([-100], [100], 0), ([-1, 0, 0, 0], [40, 0, 0.1, 0.1], 0)],
)
def test_wide_box(low, high, dimension):
    """A dimension that is very wide, by itself or beside the others, is probably not meant to be explored from end to end."""
    space = spaces.Box(np.float32(low), np.float32(high))
    with pytest.warns(UserWarning, match=f"very wide in its dimension {dimension}"):
        MlpPolicy(VECTOR, space, SCHEDULE, action_dist="beta")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MlpPolicy(VECTOR, space, SCHEDULE)
        for low, high in [(BOX_ACTION.low, BOX_ACTION.high), ([-1, 2, 2], [1, 2, 2]), ([-0.01, -1], [0.01, 1])]:
            MlpPolicy(VECTOR, spaces.Box(np.float32(low), np.float32(high)), SCHEDULE, action_dist="beta")


def test_standard_deviation_of_beta():
    """There is none to start from, as entries of the Zoo do."""
    with pytest.warns(UserWarning, match=r"`log_std_init=-2\.0` has no effect"):
        make("beta", policy_kwargs=dict(log_std_init=-2.0))


# Policies of other classes, and other algorithms


class Sb3Policy(ActorCriticPolicy):
    pass


class AnyKeyword(ActorCriticPolicy):
    """Its keywords are its own business."""

    def __init__(self, *args, learn_std="own", **kwargs):
        self.mine = learn_std, kwargs.pop("mean_tanh", None)
        super().__init__(*args, **kwargs)


class Tight(MlpPolicy):
    def __init__(self, observation_space, action_space, lr_schedule, use_sde=False):
        super().__init__(observation_space, action_space, lr_schedule, use_sde=use_sde)


class Stubborn(MlpPolicy):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{**kwargs, "action_dist": "beta"})


class OurPolicy(MlpPolicy):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{**kwargs, "net_arch": [5]})


class Mixed(ActionDistributionMixin, Sb3Policy):
    pass


@pytest.mark.parametrize("action_dist", BOUNDED)
def test_own_policy_classes(action_dist):
    """Those that inherit the action distributions have them; for others the message tells how."""
    for policy_class in (Sb3Policy, AnyKeyword, Tight):
        with pytest.raises(ValueError, match=f"`action_dist=.*{policy_class.__name__} does not take it; let it inherit"):
            PPOExt(policy_class, ToyEnv(), action_dist=action_dist)
    for policy_class in (Sb3Policy, Tight):
        with pytest.raises(ValueError, match=f"`mean_tanh=True`.*{policy_class.__name__} does not take it; let it inherit"):
            PPOExt(policy_class, ToyEnv(), policy_kwargs=dict(mean_tanh=True))
    # One that decides by itself must be told so.
    with pytest.raises(ValueError, match=r"`action_dist='gaussian'`.*Stubborn makes it 'beta'"):
        PPOExt(Stubborn, ToyEnv())
    if action_dist != "beta":
        with pytest.raises(ValueError, match=f"`action_dist='{action_dist}'`.*Stubborn makes it 'beta'"):
            PPOExt(Stubborn, ToyEnv(), action_dist=action_dist)
    assert PPOExt(Stubborn, ToyEnv(), action_dist="beta").policy.squash_output
    for policy_class in (OurPolicy, Mixed):
        model = PPOExt(policy_class, make_toys(), action_dist=action_dist, n_steps=16, batch_size=8).learn(32)
        assert type(model.policy) is policy_class
        assert model.policy.squash_output
    # SB3's classes stand for their names.
    assert type(PPOExt(ActorCriticPolicy, ToyEnv(), action_dist=action_dist).policy) is MlpPolicy


def test_keywords_of_other_policies():
    """They may share the names of ours."""
    model = PPOExt(AnyKeyword, ToyEnv(), policy_kwargs=dict(learn_std=0.5, mean_tanh="yes", net_arch=[3]))
    assert model.policy.mine == (0.5, "yes")


def test_without_action_dist_it_is_sb3():
    """By name the policy is SB3's class, so that SB3 loads what is saved; our classes give the same numbers."""
    model = make()
    assert type(model.policy) is ActorCriticPolicy
    for policy_class in (MlpPolicy, Mixed):
        ours = make(policy=policy_class, backend="eager").learn(64)
        theirs = PPO("MlpPolicy", make_toys(), **SMALL).learn(64)
        assert_equal(theirs.policy.state_dict(), ours.policy.state_dict(), "policy")
    sde = dict(use_sde=True, policy_kwargs=dict(squash_output=True))
    ours = make(policy=MlpPolicy, backend="eager", **sde).learn(64)
    theirs = PPO("MlpPolicy", make_toys(), **{**SMALL, **sde, "policy_kwargs": dict(net_arch=[8, 8], squash_output=True)})
    assert_equal(theirs.learn(64).policy.state_dict(), ours.policy.state_dict(), "policy")
    np.testing.assert_array_equal(theirs.policy.scale_action(BOX_ACTION.high), ours.policy.scale_action(BOX_ACTION.high))


@pytest.mark.parametrize("action_dist", BOUNDED)
@pytest.mark.parametrize("algorithm", [A2C, PPO, TRPO])
def test_other_algorithms(action_dist, algorithm, tmp_path):
    """Those of SB3 and SB3-Contrib work with these policies; the environment checks the actions."""
    policy_kwargs = dict(action_dist=action_dist, net_arch=[8])
    model = algorithm(MlpPolicy, make_toys(), n_steps=16, policy_kwargs=policy_kwargs, device="cpu", seed=0).learn(128)
    model.save(tmp_path / "model")
    observation = np.zeros((2, 3), np.float32)
    expected = model.predict(observation, deterministic=True)[0]
    # PPOExt finds the action distribution among the `policy_kwargs` of SB3's PPO, and goes on with it.
    for loader in (algorithm, PPOExt) if algorithm is PPO else (algorithm,):
        loaded = loader.load(tmp_path / "model", env=make_toys(), device="cpu")
        np.testing.assert_array_equal(loaded.predict(observation, deterministic=True)[0], expected)
        loaded.learn(64)
    if algorithm is PPO:
        assert loaded.action_dist == action_dist
        assert loaded.policy_kwargs == dict(net_arch=[8])
    assert BOX_ACTION.contains(expected[0])


# Saved and loaded


@pytest.mark.integration
@pytest.mark.parametrize("action_dist", BOUNDED)
def test_zip_in_another_process(action_dist, tmp_path):
    """Which imports nothing but the package."""
    model = make(action_dist).learn(32)
    model.save(tmp_path / "model")
    observation = np.float32([0.1, 0.2, -0.3])
    code = f"""
import sb3_ppo_ext
model = sb3_ppo_ext.PPOExt.load({str(tmp_path / "model")!r}, device="cpu")
print(model.action_dist, model.predict({observation.tolist()}, deterministic=True)[0].tolist())
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == f"{action_dist} {model.predict(observation, deterministic=True)[0].tolist()}\n"


KEYWORDS = [
    dict(action_dist="squashed_gaussian", log_std_init=-0.5),
    dict(action_dist="squashed_gaussian", learn_std=False, share_features_extractor=False),
    dict(action_dist="beta", deterministic_action="mode"),
    dict(mean_tanh=True, learn_std=False, log_std_init=-0.5, ortho_init=False, activation_fn=th.nn.ReLU),
    dict(share_features_extractor=False, net_arch=[4]),
]


@pytest.mark.parametrize(("policy_class", "observation_space"), POLICIES)
@pytest.mark.parametrize("keywords", KEYWORDS, ids=str)
def test_policy_alone(keywords, policy_class, observation_space, tmp_path):
    """`policy.save` and `policy.load`: the class, every keyword, and the parameters."""
    policy = policy_class(observation_space, BOX_ACTION, SCHEDULE, **keywords)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            th.nn.init.normal_(parameter, std=0.1)
    policy.save(tmp_path / "policy.pth")
    loaded = policy_class.load(tmp_path / "policy.pth")
    data, again = policy._get_constructor_parameters(), loaded._get_constructor_parameters()
    assert {k: v for k, v in data.items() if k != "lr_schedule"} == {k: v for k, v in again.items() if k != "lr_schedule"}
    assert keywords.items() <= data.items()
    assert_equal(policy.state_dict(), loaded.state_dict(), "policy")
    observation = observation_space.sample()
    expected = policy.predict(observation, deterministic=True)[0]
    np.testing.assert_array_equal(loaded.predict(observation, deterministic=True)[0], expected)


def test_action_distribution_of_a_zip_is_kept():
    """Another one is refused: the parameters of a Gaussian would fit a squashed one, and mean something else."""
    zips = {action_dist: Zip(make(action_dist)) for action_dist in ["gaussian", *BOUNDED]}
    for action_dist, saved in zips.items():
        assert saved.load(action_dist=action_dist).action_dist == action_dist
        for other in zips.keys() - {action_dist}:
            refused = pytest.raises(
                ValueError, match=f"`action_dist='{other}'`.*the saved parameters are those of '{action_dist}'"
            )
            with refused:
                saved.load(action_dist=other)
            with refused:
                make(other).set_parameters(saved.open())
            for exact_match in (True, False):
                with refused:
                    make(other).set_parameters({"policy": make(action_dist).policy.state_dict()}, exact_match=exact_match)
            if other != "gaussian":
                with refused:
                    make(other).policy.load_state_dict(make(action_dist).policy.state_dict(), strict=False)
        with pytest.raises(ValueError, match=r"`action_dist='betta'`.*\"gaussian\""):
            saved.load(action_dist="betta")
    # SB3's PPO does not know the option, and must not take the policy for a Gaussian.
    for action_dist in BOUNDED:
        with pytest.raises(ValueError, match=f"the saved parameters are those of '{action_dist}'"):
            zips[action_dist].load(PPO)
        # Nor a policy of its own class take what looks like its parameters.
        with pytest.raises(RuntimeError, match=f"action_distribution_{action_dist}"):
            PPO("MlpPolicy", make_toys(), **SMALL).policy.load_state_dict(make(action_dist).policy.state_dict())


@pytest.mark.parametrize("exact_match", [True, False])
def test_parameters_of_earlier_versions(exact_match):
    """They name the action distribution in another way."""
    for name in BOUNDED:
        model, other = make(name, seed=1), make(name)
        parameters = model.policy.state_dict()
        old = {key.replace("action_distribution_", "law_"): value for key, value in parameters.items()}
        assert f"law_{name}" in old
        other.set_parameters({"policy": old, "policy.optimizer": model.policy.optimizer.state_dict()}, exact_match=exact_match)
        assert_equal(parameters, other.policy.state_dict(), "policy")
        assert f"law_{name}" in old
        for wrong in {"gaussian", *BOUNDED} - {name}:
            with pytest.raises(ValueError, match=f"the saved parameters are those of '{name}'"):
                make(wrong).set_parameters({"policy": old}, exact_match=exact_match)


def test_zips_of_ppo_are_gaussian():
    """A zip of SB3's PPO is loaded as a Gaussian, and as nothing else."""
    saved = Zip(PPO("MlpPolicy", make_toys(), **SMALL))
    assert saved.load().action_dist == "gaussian"
    with pytest.raises(ValueError, match="the saved parameters are those of 'gaussian'"):
        saved.load(action_dist="beta")


@pytest.mark.parametrize("action_dist", BOUNDED)
def test_pendulum(action_dist):
    """A task whose bounds are not 1: what is learned gets the return up, in the units of the environment."""
    env = gym.make("Pendulum-v1")
    model = PPOExt("MlpPolicy", env, action_dist=action_dist, device="cpu", n_steps=64, batch_size=32, n_epochs=2).learn(128)
    action, _ = model.predict(env.observation_space.sample())
    assert env.action_space.contains(action)


def test_exports():
    """Our policies under SB3's names."""
    assert sb3_ppo_ext.MlpPolicy is MlpPolicy
    assert issubclass(MlpPolicy, ActorCriticPolicy)


@pytest.mark.parametrize("action_dist", ["gaussian", *BOUNDED])
def test_hint_to_prefer_the_cpu(action_dist):
    """SB3's own, which goes by the name of the policy's class."""
    model = make(action_dist)
    model.device = th.device("cuda")
    with pytest.warns(UserWarning, match="trying to run PPOExt on the GPU"):
        model._maybe_recommend_cpu()


def test_optimizer_of_beta():
    """With the learning rate and arguments that SB3 gives to its own."""
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


def test_head_of_beta():
    """Orthogonal with a gain of 0.01, as SB3's heads, unless the user wants none of it; alpha = beta = 1.31 at first."""
    for ortho_init, low, high in [(True, 0.0099, 0.0101), (False, 0.05, 1.0)]:
        policy = MlpPolicy(VECTOR, BOX_ACTION, SCHEDULE, action_dist="beta", ortho_init=ortho_init)
        norms = policy.action_net.weight.norm(dim=1)
        assert ((norms > low) & (norms < high)).all()
        assert (policy.action_net.bias == -1).all()
    distribution = MlpPolicy(VECTOR, BOX_ACTION, SCHEDULE, action_dist="beta").get_distribution(th.zeros(1, 3))
    np.testing.assert_allclose(parameters(distribution).detach(), 1.31, atol=0.01)


@pytest.mark.parametrize("action_dist", BOUNDED)
def test_parameters_with_noise(action_dist):
    """As in SB3's example of an evolution strategy: every tensor takes noise, and partial parameters can be loaded."""
    model = make(action_dist)
    parameters = {
        k: v + 0.1 * th.randn_like(v) for k, v in model.policy.state_dict().items() if "action" in k or "policy" in k
    }
    model.policy.load_state_dict(parameters, strict=False)
    assert th.equal(model.policy.action_net.weight, parameters["action_net.weight"])
    {k: v + th.randn_like(v) for k, v in model.policy.state_dict().items()}


def test_parameters_can_be_assigned():
    """A standard deviation that is not learned does not come back to learning by it."""
    policies = [MlpPolicy(VECTOR, BOX_ACTION, SCHEDULE, learn_std=fixed, log_std_init=-1.0) for fixed in (True, False)]
    policies[1].load_state_dict(policies[0].state_dict(), assign=True)
    assert policies[1].action_net.weight.data_ptr() == policies[0].action_net.weight.data_ptr()
    assert not policies[1].log_std.requires_grad


def test_statistics_are_of_the_last_epoch():
    """As the KL divergence: of each sample once."""
    model = make("beta", n_epochs=3)
    seen = []
    model.policy.action_dist.statistics = lambda parameters: seen.append(len(parameters)) or {}
    model.learn(32)
    assert seen == [32]


@pytest.mark.parametrize("action_dist", BOUNDED)
def test_no_statistics_without_a_step(action_dist):
    """If every minibatch was left out, what would be logged of the Gaussian is not logged of latents."""

    class Bad(PPOExt):
        def extra_actor_loss(self, rollout_data, distribution):
            return th.tensor(float("nan")), {}

    model = Bad("MlpPolicy", make_toys(), action_dist=action_dist, bad_gradients="skip", **SMALL).learn(32)
    assert "train/actions_at_bounds" not in model.logger.name_to_value


def test_locals_at_the_end_of_a_rollout():
    """Of the same shapes as SB3's, with discrete actions too."""

    class Shapes(BaseCallback):
        def _on_step(self):
            return True

        def _on_rollout_end(self):
            self.shapes = {k: v.shape for k, v in self.locals.items() if k in ("actions", "clipped_actions", "values")}

    for space in (BOX_ACTION, spaces.Discrete(3), spaces.MultiBinary(2)):
        ours, theirs = Shapes(), Shapes()
        PPOExt("MlpPolicy", make_toys(action_space=space), **SMALL).learn(32, callback=ours)
        PPO("MlpPolicy", make_toys(action_space=space), **SMALL).learn(32, callback=theirs)
        assert ours.shapes == theirs.shapes


@pytest.mark.parametrize("name", ["mass_near_bounds", "concentration", "std"])
def test_reserved_names(name):
    """The hook cannot log under them."""

    class Hooked(PPOExt):
        def extra_actor_loss(self, rollout_data, distribution):
            return 0.0, {name: 1.0}

    with pytest.raises(ValueError, match=name):
        Hooked("MlpPolicy", make_toys(), action_dist="beta", **SMALL).learn(32)
