"""Policies of hybrid actions: what they predict and evaluate, which options act on them, and which are refused."""

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import A2C
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import VecCheckNan
from support.hybrid import KICK, SPACES, WITH_BOXES, equal, make_only_parts, observe
from support.policies import SCHEDULE, make
from support.toys import DICT, IMAGE, VECTOR, make_toys
from support.zips import Zip

from sb3_ppo_ext import MlpPolicy, PPOExt
from sb3_ppo_ext.common.hybrid_actions import FlatActionSpace
from sb3_ppo_ext.distributions import TanhGaussianDistribution, kl_divergence, parameters

POLICIES = {
    "MlpPolicy": VECTOR,
    "CnnPolicy": IMAGE,
    "MultiInputPolicy": DICT,
    "MlpTransformerPolicy": VECTOR,
    "MultiInputTransformerPolicy": DICT,
    "MlpLstmPolicy": VECTOR,
    "MultiInputLstmPolicy": DICT,
}
TINY = dict(n_steps=8, batch_size=8, n_epochs=1, seed=0, device="cpu")


def policy_of(space, **kwargs):
    th.manual_seed(0)
    policy = MlpPolicy(VECTOR, space, SCHEDULE, net_arch=[8], **kwargs)
    with th.no_grad():
        policy.action_net[0].weight.normal_() if kwargs.get("mean_tanh") else policy.action_net.weight.normal_()
    return policy


# Prediction


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["dict", "nested"])
def test_prediction(policy, name):
    """For one observation an action of the space, for several a list of them; the same with and without a batch."""
    toys = make_toys(observation_space=POLICIES[policy], action_space=SPACES[name])
    model, space = PPOExt(policy, toys, **TINY), SPACES[name]
    observations = model.env.reset()
    actions, state = model.predict(observations, deterministic=True)
    assert isinstance(actions, list)
    assert len(actions) == 2
    assert all(space.contains(action) for action in actions)
    model.env.step(actions)
    assert all(space.contains(action) for action in model.predict(observations, state)[0])
    one = {key: part[1] for key, part in observations.items()} if isinstance(observations, dict) else observations[1]
    alone, _ = model.predict(one, deterministic=True)
    assert space.contains(alone)
    flat = FlatActionSpace(space)
    np.testing.assert_allclose(flat.flattened([alone]), flat.flattened(actions[1:]), atol=1e-5)


@pytest.mark.parametrize("action_dist", ["gaussian", "squashed_gaussian", "beta"])
@pytest.mark.parametrize("name", WITH_BOXES)
def test_bounds(name, action_dist):
    """However large the outputs of the policy are, its actions are in the space."""
    policy = policy_of(SPACES[name], action_dist=action_dist)
    for size in (1.0, 30.0):
        with th.no_grad():
            policy.action_net.bias.normal_(0, size)
        for deterministic in (False, True):
            actions, _ = policy.predict(observe(40), deterministic=deterministic)
            assert all(SPACES[name].contains(action) for action in actions)


def test_prediction_is_what_was_sampled():
    """The parts of an action are those of the vector that the policy samples, scaled to their bounds."""
    policy = policy_of(KICK, action_dist="squashed_gaussian")
    th.manual_seed(1)
    actions, _ = policy.predict(observe(30))
    th.manual_seed(1)
    vectors, _, _ = policy.forward(th.from_numpy(observe(30)))
    power = [-1, -2] + (np.tanh(vectors[:, :2].detach().numpy()) + 1) / 2 * [2, 5]
    np.testing.assert_allclose([action["power"] for action in actions], power, rtol=1e-4, atol=1e-5)
    assert [action["kind"] for action in actions] == vectors[:, 2].int().tolist()
    assert {type(action["kind"]) for action in actions} == {np.int64}
    assert {action["kind"] for action in actions} == {0, 1, 2}


def test_nan_in_the_policy():
    """Actions of a policy with NaN are refused, also where PyTorch does not validate the parameters of distributions."""
    policy = policy_of(KICK)
    with th.no_grad():
        policy.action_net.weight[0] = th.nan
    with pytest.raises(ValueError, match="nan"):
        policy.predict(observe(2))
    with pytest.raises(ValueError, match="are not finite"):
        policy.action_space.structured(np.full((1, 3), np.nan))


# Evaluation


@pytest.mark.parametrize("action_dist", ["gaussian", "squashed_gaussian", "beta"])
@pytest.mark.parametrize("name", WITH_BOXES)
def test_actions_of_the_environment(name, action_dist):
    """Actions, in a list or in arrays, have the log probability of the latents that they come from, with gradients."""
    policy, obs = policy_of(SPACES[name], action_dist=action_dist), th.from_numpy(observe(20))
    with th.no_grad():
        samples, _, expected = policy.forward(obs)
        samples[:, : policy.action_space.n_continuous].clamp_(0.2, 0.8)  # inside of the bounds with every distribution
        _, expected, _ = policy.evaluate_actions(obs, samples)
    flat = policy.action_space
    within = policy.unscale_action(samples.numpy()) if policy.squash_output else np.clip(samples.numpy(), flat.low, flat.high)
    if not policy.squash_output:
        _, expected, _ = policy.evaluate_actions(obs, th.from_numpy(within))
    actions = flat.structured(within)
    values, log_prob, entropy = policy.evaluate_env_actions(obs, actions)
    th.testing.assert_close(log_prob, expected, rtol=1e-3, atol=1e-3)
    assert values.requires_grad
    assert entropy.shape == log_prob.shape == (20,)
    batched = policy.evaluate_env_actions(obs, flat.batched(th.from_numpy(within)))[1]
    th.testing.assert_close(batched, log_prob, rtol=1e-4, atol=1e-4)
    log_prob.mean().backward()
    assert policy.action_net.weight.grad.abs().max() > 0


def test_bad_actions_of_the_environment():
    """Actions out of bounds, of another kind, or of another space are refused."""
    policy, obs = policy_of(KICK), th.from_numpy(observe(1))
    for action in (
        dict(kind=0, power=np.float32([5, 0])),
        dict(kind=0, power=np.float32([np.nan, 0])),
        dict(kind=3, power=np.float32([0, 0])),
        dict(kind=0),
        (0, np.float32([0, 0])),
    ):
        with pytest.raises(ValueError, match="`actions"):
            policy.evaluate_env_actions(obs, [action])
    with pytest.raises(ValueError, match=r"evaluates latents from 0 to 1; give actions to `policy.evaluate_env_actions`"):
        policy_of(KICK, action_dist="beta").evaluate_actions(obs, th.tensor([[0.5, 1.5, 2.0]]))
    policy_of(KICK, action_dist="beta").evaluate_actions(obs, th.tensor([[0.5, 0.5, 2.0]]))


def test_log_probability_by_hand():
    """That of a kick is the sum of a category's and of two tanh-squashed Gaussians'."""
    policy, obs = policy_of(KICK, action_dist="squashed_gaussian", log_std_init=-0.5), th.from_numpy(observe(1))
    outputs = policy.action_net(policy.mlp_extractor.forward_actor(obs))
    u = th.atanh(th.tensor([[0.5, -0.25]]))
    power = np.float32([-1, -2]) + (np.float32([0.5, -0.25]) + 1) / 2 * np.float32([2, 5])
    squashed = TanhGaussianDistribution(2).proba_distribution(outputs[:, :2], th.full((2,), -0.5))
    expected = squashed.log_prob(u) + outputs[:, 2:].log_softmax(dim=1)[:, 1]
    found = policy.evaluate_env_actions(obs, [dict(kind=np.int64(1), power=power)])[1]
    th.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# Options


def test_mean_tanh():
    """tanh keeps the means of the boxes within their bounds, and does nothing to the logits."""
    policy = policy_of(SPACES["all kinds"], mean_tanh=True)
    with th.no_grad():
        policy.action_net[0].bias.fill_(50.0)
    distribution = policy.get_distribution(th.from_numpy(observe(10)))
    mean = distribution.continuous.distribution.mean
    assert (mean <= th.tensor([1.0, 1.0, 0.1])).all()
    assert (mean[:, 2] > 0.0999).all()
    assert (distribution.distributions[2].distribution.logits > 20).all()


def test_learn_std():
    """The standard deviations of the boxes stay as they are."""
    kwargs = dict(learn_std=False, log_std_init=-1.0)
    model = make(action_space=KICK, policy_kwargs=kwargs, learning_rate=0.01).learn(32)
    assert model.policy.log_std.tolist() == [-1.0, -1.0]
    assert not model.policy.log_std.requires_grad
    assert make(action_space=KICK, learning_rate=0.01).learn(32).policy.log_std.abs().max() > 0


def test_log_std_of_each_box_dimension():
    """A tensor has one number for each dimension of the boxes."""
    policy = policy_of(SPACES["all kinds"], log_std_init=th.tensor([-1.0, -2.0, -3.0]))
    assert policy.log_std.tolist() == [-1.0, -2.0, -3.0]
    assert any(parameter is policy.log_std for group in policy.optimizer.param_groups for parameter in group["params"])
    with pytest.warns(UserWarning, match="has no effect"):
        policy_of(KICK, action_dist="beta", log_std_init=-1.0)


def test_deterministic_action_is_changed():
    """The option acts on the boxes, also between two trainings."""
    model = make("beta", KICK)
    assert model.policy.action_dist.continuous.deterministic_action == "mean"
    model.deterministic_action = "mode"
    model.learn(16)
    assert model.policy.action_dist.continuous.deterministic_action == "mode"


def test_logged_statistics():
    """Statistics of bounds and standard deviations are those of the boxes."""
    logged = make(action_space=SPACES["all kinds"], bounds_coef=0.1, kl_coef=0.1).learn(32).logger.name_to_value
    assert {"train/std", "train/actions_at_bounds", "train/bounds_loss", "train/kl"} <= logged.keys()
    # The column of 0.1 is at a bound most of the time, those from -1 to 1 in a third of it.
    assert 0.2 < logged["train/actions_at_bounds"] < 0.8
    logged = make("beta", SPACES["all kinds"]).learn(32).logger.name_to_value
    assert 0 < logged["train/mass_near_bounds"] < 0.1
    assert "train/std" not in logged
    logged = make(action_space=SPACES["integers"]).learn(32).logger.name_to_value
    assert not {"train/std", "train/actions_at_bounds"} & logged.keys()


REFUSED = {
    "gSDE": (dict(use_sde=True), KICK, "`use_sde=True`.* give False"),
    "Beta without a box": (dict(action_dist="beta"), SPACES["integers"], "`action_dist='beta'`.*has no Box"),
    "bounds loss without a box": (dict(bounds_coef=0.1), SPACES["integers"], "`bounds_coef=0.1`.*has no bounds"),
    "tanh without a box": (dict(policy_kwargs=dict(mean_tanh=True)), SPACES["integers"], "`mean_tanh=True`.*has no Box"),
    "no std without a box": (dict(policy_kwargs=dict(learn_std=False)), SPACES["integers"], "`learn_std=False`.*has no Box"),
    "tanh of Beta": (dict(action_dist="beta", policy_kwargs=dict(mean_tanh=True)), KICK, "`mean_tanh=True`"),
    "bounds loss of Beta": (dict(action_dist="beta", bounds_coef=0.1), KICK, "`bounds_coef=0.1`"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_options(case):
    """Options that have no meaning for the space are refused by name."""
    options, space, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        PPOExt("MlpPolicy", make_toys(action_space=space), **{**TINY, **options})


def test_refused_classes():
    """A policy class of SB3's kind, and `VecCheckNan`, are refused by name, since they cannot handle such actions."""

    class Own(ActorCriticPolicy):
        pass

    with pytest.raises(ValueError, match=r"`policy=.*let it inherit `sb3_ppo_ext.MlpPolicy`"):
        PPOExt(Own, make_toys(action_space=KICK), **TINY)
    with pytest.raises(ValueError, match=r"`env=.*VecCheckNan"):
        PPOExt("MlpPolicy", VecCheckNan(make_toys(action_space=SPACES["tuple"])), **TINY)
    with pytest.raises(ValueError, match="`use_sde=True`"):
        MlpPolicy(VECTOR, KICK, SCHEDULE, use_sde=True)


def test_inherited_policy():
    """A class that inherits ours works as it is."""

    class Own(MlpPolicy):
        pass

    model = PPOExt(Own, make_toys(action_space=KICK), **TINY).learn(16)
    assert KICK.contains(model.predict(observe())[0])


# Files


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("action_dist", ["gaussian", "beta"])
@pytest.mark.parametrize("name", WITH_BOXES)
def test_saved_policy(name, action_dist, trusted):
    """A saved policy acts as before, and has the action space of the environment among its arguments."""
    policy = policy_of(SPACES[name], action_dist=action_dist)
    loaded = Zip(policy).load(MlpPolicy, trusted=trusted)
    assert loaded._get_constructor_parameters()["action_space"] == SPACES[name]
    for expected, actual in zip(*(each.predict(observe(5), deterministic=True)[0] for each in (policy, loaded)), strict=True):
        assert equal(expected, actual)
    with pytest.raises(ValueError, match="parameters are those of"):
        policy_of(SPACES[name], action_dist="squashed_gaussian").load_state_dict(policy.state_dict())


def test_divergence_of_policies():
    """The KL divergence of two policies is that of all parts together."""
    one, other = policy_of(KICK), policy_of(KICK)
    with th.no_grad():
        other.action_net.bias += th.tensor([0.5, 0.0, 0.0, 0.0, 0.0])
        other.log_std.copy_(one.log_std)
    obs = th.from_numpy(observe(7))
    divergence = kl_divergence(parameters(one.get_distribution(obs)), other.get_distribution(obs))
    th.testing.assert_close(divergence, th.full((7,), 0.125))


def test_only_spaces_of_sb3_for_its_own_algorithms():
    """SB3's algorithms know no such spaces, with our policies either, and say so."""
    with pytest.raises(AssertionError, match="The algorithm only supports"):
        A2C(MlpPolicy, make_toys(action_space=KICK))


def test_one_part():
    """The policy of a dictionary with one part begins with the parameters of that part's policy, and acts as it does."""
    for space in (KICK["power"], KICK["kind"], spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(2)):
        plain = PPOExt(MlpPolicy, make_toys(action_space=space), **TINY)
        hybrid = PPOExt(MlpPolicy, make_only_parts(space), **TINY)
        for name, value in plain.policy.state_dict().items():
            th.testing.assert_close(hybrid.policy.state_dict()[name], value, rtol=0, atol=0)
        expected, found = (model.predict(observe(9), deterministic=True)[0] for model in (plain, hybrid))
        np.testing.assert_array_equal([action["only"] for action in found], expected)
