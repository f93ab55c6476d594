"""Correlated action noise has the correlations that it should have, in every engine and policy, and goes on after rollouts."""

from functools import partial

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import ActorCriticPolicy
from support.parity import assert_equal
from support.torch_envs import ToyTensors
from support.toys import BOX_ACTION, IMAGE, make_toys

from sb3_ppo_ext import ParallelVecEnv, PPOExt, TrainingCheckpoint
from sb3_ppo_ext.distributions.colored_noise import N_TERMS, colored, weights

HYBRID = spaces.Dict({"push": BOX_ACTION, "button": spaces.Discrete(3)})
POLICIES = {
    **{backend: dict(backend=backend) for backend in ("native", "fused", "eager", "device")},
    "squashed": dict(action_dist="squashed_gaussian"),
    "squashed, eager": dict(action_dist="squashed_gaussian", backend="eager"),
    "tanh of the mean": dict(policy_kwargs=dict(mean_tanh=True)),
    "images": dict(policy="CnnPolicy", observation_space=IMAGE),
    "LSTM": dict(policy="MlpLstmPolicy"),
    "transformer": dict(policy="MlpTransformerPolicy"),
    "hybrid": dict(action_space=HYBRID),
    "hybrid, eager": dict(action_space=HYBRID, backend="eager"),
    "tensors": dict(make_env=ToyTensors),
}


def make(policy="MlpPolicy", noise_color=0.5, env=None, make_env=make_toys, **options):
    of_env = {name: options.pop(name) for name in ("observation_space", "action_space") if name in options}
    given = {"n_steps": 16, "batch_size": 16, "n_epochs": 1, "seed": 0, "device": "cpu", **options}
    return PPOExt(policy, env or make_env(**of_env), noise_color=noise_color, **given)


def test_weights():
    """For beta = 0.5, the order is 1/4, and each weight is that of the term before, times (k - 3/4) / k."""
    terms = np.array([1, 1 / 4, 5 / 32, 15 / 128, 195 / 2048])
    assert np.allclose(weights(0.5)[:5] / weights(0.5)[0], terms)
    for beta in (0.0, 0.5, 1.0, 2.0):
        assert np.square(weights(beta)).sum() == pytest.approx(1)
    assert weights(0.0).tolist() == [1.0, *[0.0] * (N_TERMS - 1)]
    assert np.allclose(weights(2.0), N_TERMS**-0.5)  # a random walk without its far past


def test_noise_is_a_sum_of_white_numbers():
    """A single number that is not 0 is seen in all later sums, with the weight of its age."""
    white = th.zeros(N_TERMS + 9, 2, 3)
    white[N_TERMS, 1, 2] = 2.0  # one step after the first one
    noise = colored(white, 0.5)
    assert noise.shape == (10, 2, 3)
    assert np.allclose(noise[:, 1, 2], [0.0, *(2 * weights(0.5)[:9])])
    assert noise.abs().sum() == pytest.approx(float(noise[:, 1, 2].sum()))
    assert th.equal(colored(white, 0.0), white[N_TERMS - 1 :])


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_samples_with_it(name):
    """With noise of 1, the first action is a standard deviation larger than with noise of 0."""
    options, samples = POLICIES[name], []
    for level in (0.0, 1.0):
        model = make(**{**options, "policy_kwargs": {"log_std_init": -1.0, **options.get("policy_kwargs", {})}})
        model._draw_noise = lambda n_envs, n_steps, level=level: th.full((n_steps, n_envs, 2), level)
        model.learn(1)
        samples.append(np.array(model.rollout_buffer.actions).reshape(16 * 2, -1)[0])
    assert np.allclose(samples[1][:2] - samples[0][:2], np.exp(-1))


@pytest.mark.parametrize("backend", ["fused", "eager", "device"])
def test_engines_draw_the_same(backend):
    """Rollouts have the same actions in all engines, and log probabilities of white noise."""
    first, other = (make(backend=each).learn(1).rollout_buffer for each in ("native", backend))
    assert np.allclose(first.actions, other.actions, atol=1e-6)
    assert np.allclose(first.log_probs, other.log_probs, atol=1e-5)


def test_noise_goes_on_in_the_next_rollout():
    """Two rollouts have the noise that one of their length would have, and other environments begin anew."""
    model = make()
    th.manual_seed(1)
    parts = [model._draw_noise(2, 16), model._draw_noise(2, 16)]
    model._white_noise = None
    th.manual_seed(1)
    assert th.allclose(th.cat(parts), model._draw_noise(2, 32), atol=1e-6)
    assert model._draw_noise(5, 4).shape == (4, 5, 2)
    assert make(noise_color=0.0)._draw_noise(2, 16) is None


def test_actions_are_correlated():
    """Those of successive steps have the correlation of fractional noise, 1/3; those of two environments have none."""
    model = make(env=make_toys(n_envs=8), noise_color=0.5, n_steps=2048, batch_size=4096).learn(1)
    model.policy.set_training_mode(False)
    actions = np.asarray(model.rollout_buffer.actions).reshape(8, 2048, 2)  # environment after environment
    actions = (actions - actions.mean(axis=(0, 1))) / actions.std(axis=(0, 1))
    assert np.mean(actions[:, 1:] * actions[:, :-1]) == pytest.approx(1 / 3, abs=0.03)
    assert np.mean(actions[1:] * actions[:-1]) == pytest.approx(0, abs=0.03)


class Interrupt(BaseCallback):
    def _on_step(self):
        if self.num_timesteps >= 80:
            raise KeyboardInterrupt
        return True


def test_resuming_is_exact(tmp_path):
    """A training that is resumed from a checkpoint goes on with its noise."""
    expected = make().learn(160, callback=TrainingCheckpoint(32, tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        make().learn(160, callback=[TrainingCheckpoint(32, tmp_path / "parts"), Interrupt()])
    resumed = PPOExt.resume(tmp_path / "parts", make_toys())
    resumed.learn(160, callback=TrainingCheckpoint(32, tmp_path / "parts"))
    assert_equal(expected.policy.state_dict(), resumed.policy.state_dict(), "policy")
    loaded = make().learn(32)
    loaded.save(tmp_path / "model")
    loaded = PPOExt.load(tmp_path / "model", make_toys(n_envs=3))  # whose noise begins anew
    assert loaded.noise_color == 0.5
    loaded.learn(32)


@pytest.mark.integration
def test_several_processes():
    """Each process has the noise of its environments."""
    models = []
    for overlap in (False, True):
        env = make_toys(n_envs=4, vec_env_class=partial(ParallelVecEnv, overlap=overlap))
        models.append(make(env=env).learn(128))
        env.close()
    assert_equal(*(model.policy.state_dict() for model in models), "policy")


@pytest.mark.parametrize(
    "options",
    [
        dict(use_sde=True),
        dict(action_dist="beta"),
        dict(action_space=spaces.Discrete(3)),
        dict(action_space=spaces.Dict({"button": spaces.Discrete(3), "gear": spaces.Discrete(2)})),
        dict(noise_color=2.1),
        dict(noise_color=-0.1),
    ],
    ids=str,
)
def test_refused(options):
    """What has no Gaussian noise, and exponents out of the range, are refused by name."""
    with pytest.raises(ValueError, match="noise_color"):
        make(**options)


class OwnSamples(ActorCriticPolicy):
    """A user's policy that does not ask its distribution for actions"""

    def forward(self, obs, deterministic=False):
        distribution = self.get_distribution(obs)
        actions = distribution.distribution.rsample()
        return actions, self.predict_values(obs), distribution.log_prob(actions)


@pytest.mark.parametrize("backend", ["auto", "eager", "device"])
def test_a_policy_that_samples_in_its_own_way(backend):
    """It is refused in the first step, instead of sampling with white noise."""
    make(policy=OwnSamples, noise_color=0.0, backend=backend).learn(16)
    with pytest.raises(ValueError, match=r"`noise_color`.*OwnSamples does not sample by `get_actions`"):
        make(policy=OwnSamples, backend=backend).learn(16)


def test_changed_between_two_calls():
    """It may be changed, and takes effect in the next rollout; a policy without a Gaussian refuses it."""
    model = make(noise_color=0.0).learn(32)
    model.noise_color = 1.0
    assert model.learn(32)._white_noise.shape == (N_TERMS - 1, 2, 2)
    model = make(noise_color=0.0, action_dist="beta")
    model.noise_color = 1.0
    with pytest.raises(ValueError, match="noise_color"):
        model.learn(32)
