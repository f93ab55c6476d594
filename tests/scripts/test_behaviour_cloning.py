"""Behaviour cloning as in the example: each action distribution learns recorded actions, and PPO goes on from there."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from support.cases import one_in
from support.toys import VECTOR, Samples

from sb3_ppo_ext import MlpPolicy, MultiInputPolicy, PPOExt

pytestmark = pytest.mark.integration

PATH = Path(__file__).parents[2] / "examples" / "behaviour_cloning.py"


@pytest.fixture(scope="module")
def example():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("behaviour_cloning", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BOX = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 5.0], np.float32))
HYBRID = spaces.Dict(gear=spaces.Discrete(3), force=spaces.Box(-1, 1, (1,), np.float32))
DICT = spaces.Dict(seen=spaces.Box(-1, 1, (3,), np.float32), other=spaces.Discrete(2))


def to_box(seen):
    return np.stack([2 * np.sin(2 * seen[:, 0]), 2.5 + 2.5 * seen[:, 1]], axis=1).astype(np.float32)


def to_hybrid(seen):
    gears = np.digitize(seen[:, 0], [-0.3, 0.3])
    return [dict(gear=gear, force=np.array([force], np.float32)) for gear, force in zip(gears, seen[:, 1], strict=True)]


# Action space, options, and the expert's actions as a function of the observations
CASES = {
    "gaussian": (BOX, {}, to_box),
    "gsde": (BOX, dict(use_sde=True), to_box),
    "squashed_gaussian": (BOX, dict(action_dist="squashed_gaussian"), to_box),
    "beta": (BOX, dict(action_dist="beta"), to_box),
    "mean_tanh": (BOX, dict(policy_kwargs=dict(mean_tanh=True)), to_box),
    "categorical": (spaces.Discrete(3), {}, lambda seen: np.digitize(seen[:, 0], [-0.3, 0.3])),
    "multi-categorical": (spaces.MultiDiscrete([2, 2]), {}, lambda seen: (seen[:, :2] > 0).astype(int)),
    "bernoulli": (spaces.MultiBinary(3), {}, lambda seen: (seen > 0).astype(np.int8)),
    "hybrid": (HYBRID, {}, to_hybrid),
    "hybrid-beta": (HYBRID, dict(action_dist="beta"), to_hybrid),
}


def make(action_space, options, policy=MlpPolicy, observation_space=VECTOR):
    env = TimeLimit(Samples(observation_space, action_space), 1)
    return PPOExt(policy, env, n_steps=32, batch_size=32, n_epochs=1, seed=0, device="cpu", **options)


def errors(space, predicted, actions):
    """Mean absolute error of each number, relative to the width of a ``Box``; fraction of wrong choices of others."""
    if isinstance(space, spaces.Dict):
        columns = {key: [np.array([action[key] for action in each]) for each in (predicted, actions)] for key in space.spaces}
        return max(errors(space[key], *pair) for key, pair in columns.items())
    if isinstance(space, spaces.Box):
        return float((np.abs(predicted - actions) / (space.high - space.low)).mean())
    return float((predicted != actions).mean())


@pytest.mark.parametrize("name", one_in(3, CASES))
def test_each_action_distribution(name, example):
    """The clone does what the expert does, knows what it is worth, and still explores; PPO starts from it."""
    space, options, expert = CASES[name]
    seen = np.random.default_rng(0).uniform(-1, 1, (512, 3)).astype(np.float32)
    actions, returns = expert(seen), 10.0 * seen[:, 2]
    model = make(space, options)
    optimizer, log_std = model.policy.optimizer, getattr(model.policy, "log_std", None)
    before = errors(space, model.predict(seen, deterministic=True)[0], actions)
    log_std = None if log_std is None else log_std.detach().clone()
    losses = example.clone(model, example.Demonstrations(seen, actions, returns), n_epochs=40, batch_size=128)
    if name != "gsde":  # Its noise grows with the features, which the likelihood of the mean does not know.
        assert losses[-1] < losses[0] - 0.1
    after = errors(space, model.predict(seen, deterministic=True)[0], actions)
    assert after < min(0.07, before / 2)
    assert log_std is None or th.equal(model.policy.log_std, log_std)
    assert model.policy.optimizer is optimizer
    assert not optimizer.state
    with th.no_grad():
        values = model.policy.predict_values(th.as_tensor(seen)).flatten().numpy()
    assert np.corrcoef(values, returns)[0, 1] > 0.9
    model.learn(32)  # with learning rate 3e-4
    assert errors(space, model.predict(seen, deterministic=True)[0], actions) < 2 * after + 0.02


def test_dictionaries_and_no_returns(example):
    """Observations may be dictionaries; without returns, the critic is left as it is."""
    random = np.random.default_rng(0)
    seen = dict(seen=random.uniform(-1, 1, (512, 3)).astype(np.float32), other=random.integers(2, size=512))
    actions = (seen["seen"][:, 0] > 0).astype(int) * seen["other"]
    model = make(spaces.Discrete(2), {}, MultiInputPolicy, DICT)
    critic = [parameter.clone() for parameter in model.policy.mlp_extractor.value_net.parameters()]
    example.clone(model, example.Demonstrations(seen, actions), n_epochs=30, batch_size=64)
    assert (model.predict(seen, deterministic=True)[0] == actions).mean() > 0.95
    for parameter, first in zip(model.policy.mlp_extractor.value_net.parameters(), critic, strict=True):
        assert th.equal(parameter, first)


def test_policy_of_sb3(example):
    """With the policy that PPOExt takes by default for the Gaussian, which is SB3's, it works as well."""
    seen = np.random.default_rng(0).uniform(-1, 1, (512, 3)).astype(np.float32)
    model = make(BOX, {}, "MlpPolicy")
    example.clone(model, example.Demonstrations(seen, to_box(seen)), n_epochs=30, batch_size=128)
    assert errors(BOX, model.predict(seen, deterministic=True)[0], to_box(seen)) < 0.1


def test_policies_with_memory_are_refused(example):
    """Their likelihood depends on the whole episode, which single steps do not have."""
    model = PPOExt("MlpLstmPolicy", "CartPole-v1", device="cpu")
    data = example.Demonstrations(np.zeros((4, 4), np.float32), np.zeros(4, int))
    with pytest.raises(ValueError, match="MlpLstmPolicy has a memory"):
        example.clone(model, data)


def test_demonstrations(example):
    """Returns are the discounted rewards until the end of the episode, and the noise is not in the recorded actions."""
    demonstrations, mean_return = example.record(2, gamma=0.5, noise=0.5)
    assert demonstrations.observations.shape == (400, 3)
    assert demonstrations.returns.shape == (400,)
    expected = np.stack([example.swing_up(observation) for observation in demonstrations.observations])
    assert np.array_equal(demonstrations.actions, expected)
    undiscounted, same_mean = example.record(2, gamma=1.0, noise=0.5)
    assert undiscounted.returns[[0, 200]].mean() == pytest.approx(mean_return) == pytest.approx(same_mean)
    assert demonstrations.returns[199] == undiscounted.returns[199]


@pytest.mark.parametrize("kind", ["box", "dict"])
def test_episodes_of_minari(kind, example):
    """Episodes as Minari has them, with one observation more than actions, become steps."""
    seen, actions = np.arange(18.0).reshape(6, 3), np.arange(5)
    if kind == "dict":
        seen, actions = dict(seen=seen, other=np.arange(6)), dict(gear=np.arange(5), force=np.zeros((5, 1)))
    episode = SimpleNamespace(observations=seen, actions=actions, rewards=np.ones(5), infos={})
    found = example.demonstrations_of([episode, episode], gamma=0.5)
    assert found.returns.tolist() == 2 * [1.9375, 1.875, 1.75, 1.5, 1.0]
    if kind == "box":
        assert np.array_equal(found.observations, np.concatenate([seen[:5], seen[:5]]))
        assert found.actions.tolist() == 2 * list(range(5))
    else:
        assert found.observations["other"].tolist() == 2 * list(range(5))
        assert [(action["gear"], action["force"].shape) for action in found.actions] == 2 * [(n, (1,)) for n in range(5)]


@pytest.mark.slow
@pytest.mark.parametrize("action_dist", ["gaussian", "gsde", "squashed_gaussian", "beta"])
def test_learning(action_dist, example, monkeypatch):
    """On Pendulum the clone is nearly as good as the expert, and PPO keeps what took it much longer to learn alone."""
    monkeypatch.setattr(sys, "argv", ["behaviour_cloning", "--action-dist", action_dist, "--timesteps", "20480"])
    results = example.main()
    assert results["expert, with noise"] > -200
    assert results["clone"] > -400
    assert results["clone, then PPO"] > -400
    assert results["PPO alone"] < results["clone, then PPO"] - 200
