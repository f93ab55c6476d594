"""V-trace with `native`: what it reads of the policy is computed in C, or taken from the rollout where nothing has changed."""

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from support.engines import VECTORS, make
from support.toys import BOX_ACTION

from sb3_ppo_ext.engines.native.policy import NativePolicy
from sb3_ppo_ext.update.estimates import Estimates
from sb3_ppo_ext.update.metrics import Metrics

STEPS = 16
CASES = {
    "box": dict(env=dict(action_space=BOX_ACTION)),
    "discrete": dict(env=dict(action_space=spaces.Discrete(3))),
    "dict": dict(env=dict(observation_space=VECTORS), policy="MultiInputPolicy"),
    "squashed": dict(action_dist="squashed_gaussian"),
    "gSDE": dict(use_sde=True),
    "normalised values": dict(normalize_value=True),
}


@pytest.mark.parametrize("case", CASES)
def test_evaluation_is_torchs(case):
    """After an update, values and log probabilities equal PyTorch's to rounding, and differ from those of the rollout."""
    model = make(vtrace=True, learning_rate=1e-2, **CASES[case])
    model.learn(STEPS * model.n_envs)
    rollout = model._rollout()
    evaluated = model._find_engine().make_evaluate(rollout)(0)
    with th.no_grad():
        expected = Estimates(model.policy, rollout, model._update_config(), Metrics()).evaluate(0)
    for name, own, of_torch in zip(("values", "log_probs"), evaluated, expected, strict=True):
        th.testing.assert_close(own, of_torch, atol=1e-5, rtol=1e-5)
        assert not th.allclose(own, rollout.columns[name], atol=1e-4), name


@pytest.fixture
def evaluations(monkeypatch):
    """Number of evaluations of a whole rollout so far, in a list."""
    found, evaluate = [], NativePolicy.values_and_log_probs

    def counted(self, observations, actions):
        found.append(len(actions))
        return evaluate(self, observations, actions)

    monkeypatch.setattr(NativePolicy, "values_and_log_probs", counted)
    return found


def collected(**options):
    """A model with a rollout from which it has not been updated."""
    model = make(vtrace=True, n_epochs=3, **options)
    _, callback = model._setup_learn(10**6)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
    return model


def test_first_epoch_takes_the_estimates_of_the_rollout(evaluations):
    """Each later epoch evaluates the policy, and so does every epoch of a second update from the same rollout."""
    model = collected()
    model.train()
    assert len(evaluations) == 1 + 2
    model.train()
    assert len(evaluations) == 1 + 2 + 3


def test_policy_changed_after_the_rollout(evaluations):
    """The first epoch evaluates it."""
    model = collected()
    with th.no_grad():
        model.policy.value_net.bias += 1.0
    model.train()
    assert len(evaluations) == 1 + 3


def test_user_code_may_change_the_rollout(evaluations):
    """After a rollout that a callback has seen, the first epoch evaluates the policy, whatever is in the buffer."""
    model = make(vtrace=True, n_epochs=1)

    def callback(variables, _):
        model.rollout_buffer.values[:] = np.nan
        return True

    model.learn(STEPS * model.n_envs, callback)
    assert len(evaluations) >= 1
    assert all(th.isfinite(parameter).all() for parameter in model.policy.parameters())
