"""`predict` of transformer policies keeps what it has computed, as long as that is what it would compute again."""

import pickle
from copy import deepcopy

import numpy as np
import pytest
import torch as th
from support.cases import one_in
from support.memory import SETTINGS, loud, make

from sb3_ppo_ext.common.observations import map_observations, stack
from sb3_ppo_ext.memory.transformer import Transformer


def observations_of(model, n_steps, n_envs=2):
    """Random observations of several steps."""
    model.observation_space.seed(0)
    return [stack([model.observation_space.sample() for _ in range(n_envs)]) for _ in range(n_steps)]


def walk(model, observations, starts=None, state=None, forgets=False):
    """Actions of `predict`, step by step; `forgets` leaves it nothing but the observations."""
    actions, rng = [], np.random.default_rng(1)
    for t, observation in enumerate(observations):
        if state is not None:
            state = state.with_rewards(rng.normal(size=len(state.known)))
            state = state._replace(known_steps=None) if forgets else state
        action, state = model.predict(observation, state, None if starts is None else starts[t], deterministic=True)
        actions.append(action)
    return np.array(actions), state


@pytest.fixture
def model():
    """A policy whose actions depend on all that it sees."""
    model = make(context_length=5, keywords=dict(n_layers=2))
    loud(model.policy)
    return model


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("setting", one_in(2, SETTINGS))
def test_one_token_a_step(setting, monkeypatch):
    """Actions are those that all observations give, also where an environment begins anew; each is encoded once."""
    model = make(**SETTINGS[setting])
    loud(model.policy)
    observations, starts = observations_of(model, 12), np.random.default_rng(0).random((12, 2)) < 0.15
    expected, _ = walk(model, observations, starts, forgets=True)
    calls, step = [], Transformer.step
    monkeypatch.setattr(Transformer, "step", lambda self, *args: calls.append(self) or step(self, *args))
    actual, _ = walk(model, observations, starts)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    assert calls == 11 * [model.policy.pi_transformer]


def edit_data(model):
    model.policy.pi_transformer.single.linear.weight.data.mul_(-1.0)


def edit_array(model):
    model.policy.pi_transformer.single.linear.weight.detach().numpy()[0] += 1.0


def edit_in_place(model):
    with th.no_grad():
        model.policy.pi_transformer.single.linear.weight.neg_()


def load_parameters(model):
    model.policy.load_state_dict({name: -value for name, value in model.policy.state_dict().items()})


def replace_parameter(model):
    linear = model.policy.pi_transformer.single.linear
    linear.weight = th.nn.Parameter(-linear.weight.detach())


def train(model):
    model.learning_rate = 0.1
    model.learn(model.n_steps * model.n_envs)


CHANGES = [edit_data, edit_array, edit_in_place, load_parameters, replace_parameter, train]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_parameters(change, model):
    """After any change of the parameters, the kept observations are computed anew, and the old state stays as it was."""
    observations = observations_of(model, 9)
    _, before = walk(model, observations[:6])
    unchanged, _ = walk(model, observations[6:], state=before)
    parameters = deepcopy(model.policy.state_dict())
    change(model)
    changed, _ = walk(model, observations[6:], state=before)
    expected, _ = walk(model, observations[6:], state=before, forgets=True)
    np.testing.assert_allclose(changed, expected, rtol=1e-4, atol=1e-5)
    assert not np.allclose(changed, unchanged)
    model.policy.load_state_dict(parameters)
    np.testing.assert_array_equal(walk(model, observations[6:], state=before)[0], unchanged)


def test_states_are_values(model):
    """A state gives the same actions as often as it is used, and so do its deep copies and pickles."""
    observations = observations_of(model, 9)
    _, state = walk(model, observations[:4])
    expected, _ = walk(model, observations[4:], state=state)
    walk(model, observations[2:], state=state)
    for other in (state, deepcopy(state), pickle.loads(pickle.dumps(state))):
        np.testing.assert_allclose(walk(model, observations[4:], state=other)[0], expected, rtol=1e-5, atol=1e-6)
    assert deepcopy(state).known_steps is not None
    assert pickle.loads(pickle.dumps(state)).known_steps is None


def test_environments_among_others(model):
    """An environment that begins anew among several acts as if it were alone."""
    observations = observations_of(model, 9, n_envs=3)
    starts = np.zeros((9, 3), bool)
    starts[4, 1] = True
    actions, _ = walk(model, observations, starts)
    alone, _ = walk(model, [map_observations(lambda part: part[1:2], one) for one in observations[4:]])
    np.testing.assert_allclose(actions[4:, 1], alone[:, 0], rtol=1e-4, atol=1e-5)
