"""V-trace in training: the targets of every epoch are those of the current policy."""

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import CallbackList
from stable_baselines3.common.save_util import load_from_zip_file
from stable_baselines3.common.torch_layers import FlattenExtractor
from support.parity import assert_equal
from support.toys import BOX_ACTION, DICT
from support.training import BOTH, Recording, changed, make, run

from sb3_ppo_ext.rollout.actors import Action, PolicyActor, Transition
from sb3_ppo_ext.rollout.gae import vtrace as vtrace_of_tensors


def vtrace(*arguments):
    """V-trace from and to NumPy."""
    tensors = (th.as_tensor(part, dtype=th.float32) if isinstance(part, np.ndarray) else part for part in arguments)
    return [part.numpy() for part in vtrace_of_tensors(*tensors)]


@pytest.mark.parametrize(("policy", "observation_space"), [("MlpPolicy", None), ("MultiInputPolicy", DICT)])
def test_vtrace_of_the_first_epoch_is_gae(policy, observation_space):
    """
    In the first epoch the policy is the one that collected: what is learned agrees but for rounding; a second epoch differs.
    """
    env = {"observation_space": observation_space} if observation_space else {}
    common = dict(policy=policy, env_kwargs=env, learning_rate=1e-2, optimizer="sgd")
    gae, corrected = (run(n_epochs=1, vtrace=vtrace, **common) for vtrace in (False, True))
    for name, expected in gae.policy.state_dict().items():
        th.testing.assert_close(corrected.policy.state_dict()[name], expected, atol=1e-5, rtol=1e-4)
    gae, corrected = (run(n_epochs=2, vtrace=vtrace, **common) for vtrace in (False, True))
    assert changed(gae, corrected) == BOTH


@pytest.mark.parametrize("action_space", [BOX_ACTION, spaces.Discrete(3)], ids=["box", "discrete"])
@pytest.mark.parametrize("length", [4, 5])  # with and without an end at the last step
def test_vtrace_uses_the_current_policy(action_space, length, monkeypatch):
    """Values, ratios, the last values and those of terminal observations are of the current policy, in every epoch."""
    monkeypatch.setattr("sb3_ppo_ext.update.rollout_data.EVALUATION_BATCH", 7)
    env = dict(action_space=action_space, length=length, p_end=0.0)
    model = make(Recording, env, vtrace=True, batch_size=32, normalize_advantage=False, learning_rate=0.02)
    model.learn(32)
    assert model._last_episode_starts.all() == (length == 4)
    buffer, policy = model.rollout_buffer, model.policy
    assert sum(len(episodes.rows) for episodes in model._truncations) >= 4
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
            for rows, observations_of_end, old_values in model._truncations:
                new_values = policy.predict_values(observations_of_end).flatten()
                rewards.reshape(-1)[rows] += model.gamma * (new_values - old_values).numpy()
                assert epoch == 0 or not np.isclose(new_values, old_values, atol=1e-4).any()
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
    """Without dropout, as while collecting, the targets of the first epoch are GAE's."""
    policy_kwargs = dict(features_extractor_class=Dropout)
    gae, corrected = (make(Recording, vtrace=v, policy_kwargs=policy_kwargs, batch_size=32).learn(32) for v in (False, True))
    expected, actual = (np.sort(model.seen[0][0].returns) for model in (gae, corrected))
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_truncations_are_kept_for_vtrace_alone(tmp_path):
    """Terminal observations are kept for V-trace alone, as copies, and not in the zip."""
    assert make()._truncations is None
    model = make(vtrace=True)
    observation = np.ones(3, np.float32)
    infos = [{"terminal_observation": observation, "TimeLimit.truncated": True}, {}]
    truncated = list(model._truncated_episodes(np.array([True, False]), infos, 3))
    observation[:] = 7.0
    actor = PolicyActor(model.rollout_buffer, model._rollout_config(CallbackList([]), 16))
    rewards, outputs = np.zeros(2, np.float32), th.zeros(2)
    action = Action(None, np.zeros((2, 2), np.float32), outputs, outputs)
    actor.record(model.policy, Transition(3, np.zeros((2, 3)), np.zeros(2), action, action.samples, rewards, 0.99, truncated))
    ((rows, kept, values),) = model._truncations
    assert (rows.tolist(), kept.tolist()) == ([3 * 2 + 0], [[1.0, 1.0, 1.0]])
    value = values.item()
    assert value == pytest.approx(model.policy.predict_values(th.ones(1, 3)).item())
    assert rewards.tolist() == pytest.approx([0.99 * value, 0.0])
    model.save(tmp_path / "model")
    assert "_truncations" not in load_from_zip_file(tmp_path / "model")[0]


def test_vtrace_takes_the_buffers_discount():
    """The discount of a user's buffer counts, as it does for GAE."""

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
