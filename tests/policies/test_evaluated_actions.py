"""Actions of an environment, and latents of a bounded distribution, that policies evaluate."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from support.policies import BOUNDED, POLICIES, SCHEDULE, make
from support.toys import BOX_ACTION, VECTOR, make_toys

from sb3_ppo_ext import MlpPolicy, PPOExt
from sb3_ppo_ext.policies.actor_critic import ActionDistributionMixin

PAGE = Path(__file__).parents[2] / "docs" / "behaviour_cloning.md"
WIDE_BOX = spaces.Box(np.float32([[-1, -3]]), np.float32([[1, 5]]))


def observed(space, n=64):
    """A batch of observations as a tensor, or a dictionary of tensors."""
    samples = [space.sample() for _ in range(n)]
    if isinstance(space, spaces.Dict):
        return {key: th.as_tensor(np.stack([sample[key] for sample in samples])) for key in space.spaces}
    return th.as_tensor(np.stack(samples))


@pytest.mark.parametrize("action_space", [BOX_ACTION, WIDE_BOX], ids=["flat", "shaped"])
@pytest.mark.parametrize(("policy_class", "space"), POLICIES, ids=["mlp", "cnn", "dict"])
@pytest.mark.parametrize("action_dist", ["gaussian", *BOUNDED])
def test_actions_of_the_environment(action_dist, policy_class, space, action_space):
    """What the policy has sampled has the same density as the action that the environment got."""
    policy = policy_class(space, action_space, SCHEDULE, net_arch=[8], action_dist=action_dist)
    observations = observed(space)
    with th.no_grad():
        samples, values, log_probs = policy(observations)
    actions = policy.unscale_action(samples.numpy()) if policy.squash_output else samples.numpy()
    inside = ((actions >= action_space.low) & (actions <= action_space.high)).reshape(len(actions), -1).all(axis=1)
    assert inside.sum() > 5
    for given in (actions[inside], th.as_tensor(actions[inside])):
        of_inside = {k: v[inside] for k, v in observations.items()} if isinstance(observations, dict) else observations[inside]
        evaluated = policy.evaluate_env_actions(of_inside, given)
        th.testing.assert_close(evaluated[0], values[inside])
        th.testing.assert_close(evaluated[1], log_probs[inside], rtol=1e-3, atol=1e-3)
        assert evaluated[1].requires_grad


@pytest.mark.parametrize(
    "action_space",
    [spaces.Discrete(3), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(3)],
    ids=["discrete", "multi", "binary"],
)
def test_discrete_actions(action_space):
    """Actions that are not in a `Box` are evaluated as they are."""
    policy = MlpPolicy(VECTOR, action_space, SCHEDULE)
    observations = observed(VECTOR)
    with th.no_grad():
        actions, _, log_probs = policy(observations)
    for given in (actions.numpy(), actions.numpy().astype(action_space.dtype)):  # as the buffer, and as an expert has them
        th.testing.assert_close(policy.evaluate_env_actions(observations, given)[1], log_probs)


def test_squashed_noise():
    """With gSDE and `squash_output`, SB3's scaling from the bounds to [-1, 1] is applied."""
    policy = MlpPolicy(VECTOR, BOX_ACTION, SCHEDULE, use_sde=True, squash_output=True)
    observations = observed(VECTOR)
    with th.no_grad():
        samples, _, log_probs = policy(observations)
    actions = policy.unscale_action(samples.numpy())
    th.testing.assert_close(policy.evaluate_env_actions(observations, actions)[1], log_probs, rtol=1e-2, atol=1e-2)


KINDS = [BOX_ACTION, spaces.Discrete(3), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(3)]


@pytest.mark.parametrize("space", KINDS, ids=str)
def test_shapes(space):
    """There is one action for each observation; dimensions of size 1 may be left out or added."""
    policy, observations = MlpPolicy(VECTOR, space, SCHEDULE), observed(VECTOR, 4)
    actions = np.stack([space.sample() for _ in range(4)])
    expected = policy.evaluate_env_actions(observations, actions)[1]
    th.testing.assert_close(policy.evaluate_env_actions(observations, actions[:, None])[1], expected)
    for bad in (actions[:1], actions[:3], np.repeat(actions, 2, axis=0)):
        with pytest.raises(ValueError, match=r"`actions.shape=.*` is not valid: give one for each observation, shape \(4,"):
            policy.evaluate_env_actions(observations, bad)


@pytest.mark.parametrize("action_dist", BOUNDED)
def test_actions_at_the_bounds(action_dist):
    """Actions at the bounds have a finite density; those that round over them are taken, others are refused."""
    policy = MlpPolicy(VECTOR, BOX_ACTION, SCHEDULE, action_dist=action_dist)
    for actions in (BOX_ACTION.low, BOX_ACTION.high, BOX_ACTION.high + 1e-6):
        assert policy.evaluate_env_actions(observed(VECTOR, 1), actions[None])[1].isfinite().all()
    for actions in (BOX_ACTION.high + 0.1, BOX_ACTION.low - 0.1, np.full(2, np.nan, np.float32)):
        with pytest.raises(ValueError, match=r"`actions=.*give actions within the bounds"):
            policy.evaluate_env_actions(observed(VECTOR, 1), actions[None])


@pytest.mark.parametrize(("action_dist", "bad"), [("beta", 1.1), ("beta", -0.1), *((name, np.nan) for name in BOUNDED)])
def test_what_is_no_latent(action_dist, bad):
    """`evaluate_actions` refuses what the distribution cannot have sampled, such as most actions of an environment."""
    policy = MlpPolicy(VECTOR, BOX_ACTION, SCHEDULE, action_dist=action_dist)
    latents = th.tensor([[0.5, 0.5], [0.0, bad]])
    with pytest.raises(
        ValueError, match=f'`actions=.*`action_dist="{action_dist}"` evaluates latents.*`policy.evaluate_env_a'
    ):
        policy.evaluate_actions(observed(VECTOR, 2), latents)
    assert policy.evaluate_samples(observed(VECTOR, 2), latents)[0].shape == (2, 1)
    assert policy.evaluate_actions(observed(VECTOR, 2)[:0], latents[:0])[1].shape == (0,)


@pytest.mark.parametrize("backend", ["eager", "fused", "native"])
def test_training_is_not_checked(backend, monkeypatch):
    """The samples of a rollout are not checked in each minibatch."""

    def refuse(*args):
        raise AssertionError("checked")

    monkeypatch.setattr(ActionDistributionMixin, "_check_latents", refuse)
    make("beta", backend=backend).learn(32)


def test_own_evaluation_is_called():
    """A policy that overrides `evaluate_actions` is evaluated by its method."""
    calls = []

    class Own(MlpPolicy):
        def evaluate_actions(self, obs, actions):
            calls.append(len(actions))
            return super().evaluate_actions(obs, actions)

    PPOExt(Own, make_toys(), n_steps=8, batch_size=8, n_epochs=1, action_dist="beta").learn(16)
    assert calls == [8, 8]


def test_behaviour_cloning():
    """The example of the documentation clones the expert, here in fewer steps."""
    (code,) = re.findall(r"```python\n(import numpy as np\nimport torch.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    namespace = {}
    exec(code.replace("range(1_000)", "range(200)"), namespace)
    assert np.abs(namespace["cloned"] - namespace["actions"]).mean() < 0.6
