"""A rollout of the native engine is what SB3 would have stored, whatever callbacks read and change."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, ConvertCallback, EvalCallback, EveryNTimesteps
from stable_baselines3.common.preprocessing import preprocess_obs
from stable_baselines3.common.utils import obs_as_tensor
from stable_baselines3.common.vec_env import VecNormalize
from support.engines import KEYS, SMALL, VECTORS, make
from support.toys import BOX_ACTION, VECTOR, RolloutRecorder, Silent, ToyEnv, make_toys

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.common.guards import NonFinitePolicyError
from sb3_ppo_ext.engines.native.inputs import Inputs
from sb3_ppo_ext.engines.native.samplers import sampler_of
from sb3_ppo_ext.rollout import collector
from sb3_ppo_ext.rollout.user_code import runs_user_code

pytest.importorskip("sb3_ppo_ext.engines.native._mlp", reason="the extension module was not built")


class Steps(BaseCallback):
    """Keeps what the environment returned, and reads no estimates."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def _on_step(self):
        names = ("rewards", "dones", "infos", "clipped_actions", "actions", "new_obs")
        self.seen.append({name: copy.deepcopy(self.locals[name]) for name in names})
        return True


ROLLOUTS = {
    "box": {},
    "discrete": dict(env=dict(action_space=spaces.Discrete(4))),
    "multi-discrete": dict(env=dict(action_space=spaces.MultiDiscrete([3, 2]))),
    "multi-binary": dict(env=dict(action_space=spaces.MultiBinary(3))),
    "discrete observations": dict(env=dict(observation_space=spaces.Discrete(5))),
    "dict of vectors": dict(env=dict(observation_space=VECTORS), policy="MultiInputPolicy"),
    "different keys": dict(env=dict(observation_space=VECTORS), policy="MultiInputPolicy", policy_kwargs=KEYS),
    "truncated together": dict(env=dict(n_envs=5, p_end=0.0)),
    "float64 observations": dict(env=dict(observation_space=spaces.Box(-1.0, 1.0, (3,), np.float64))),
    "box of shape (2, 2)": dict(env=dict(action_space=spaces.Box(-1, 1, (2, 2), np.float32))),
    "squashed": dict(action_dist="squashed_gaussian"),
    "beta": dict(action_dist="beta"),
    "gSDE": dict(use_sde=True),
    "layer_norm": dict(policy_kwargs=dict(net_type="layer_norm", net_arch=[8, 12])),
    "simba": dict(policy_kwargs=dict(net_type="simba", net_arch=dict(pi=[8], vf=[12, 12]))),
    "simba, gSDE": dict(policy_kwargs=dict(net_type="simba", net_arch=[8]), use_sde=True),
    "gSDE, squashed": dict(use_sde=True, policy_kwargs=dict(squash_output=True, log_std_init=-2.0)),
}


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize(
    ("name", "estimates"), [*((name, False) for name in ROLLOUTS), *((name, True) for name in ("box", "discrete", "gSDE"))]
)
def test_rollout(name, estimates, monkeypatch):
    """The buffer holds what SB3 would have stored for these actions: values, log probabilities, returns, bootstraps."""
    monkeypatch.setattr(collector, "runs_user_code", lambda callback: estimates)
    model, steps = make(**ROLLOUTS[name]), Steps()
    _, callback = model._setup_learn(10**6, CallbackList([steps]))
    first = copy.deepcopy(model._last_obs)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
    buffer, policy = model.rollout_buffer, model.policy
    assert buffer.full
    assert buffer.pos == model.n_steps

    expected = RolloutBuffer(16, VECTOR, BOX_ACTION, gamma=0.99, gae_lambda=0.95, n_envs=model.n_envs)
    observation, starts = first, np.ones(model.n_envs, bool)
    for t, step in enumerate(steps.seen):
        with th.no_grad():
            obs_tensor, _ = policy.obs_to_tensor(observation)
            actions = th.as_tensor(buffer.actions[t]).float()
            actions = actions.flatten() if isinstance(model.action_space, spaces.Discrete) else actions
            values, log_probs, _ = policy.evaluate_actions(obs_tensor, actions)
            for index, info in enumerate(step["infos"]):
                if info.get("TimeLimit.truncated"):
                    terminal, _ = policy.obs_to_tensor(info["terminal_observation"])
                    step["rewards"][index] += 0.99 * policy.predict_values(terminal).item()
        np.testing.assert_allclose(buffer.values[t], values.numpy().flatten(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(buffer.log_probs[t], log_probs.numpy(), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(buffer.rewards[t], step["rewards"], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(buffer.episode_starts[t], starts)
        np.testing.assert_allclose(step["clipped_actions"], model._within_bounds(_shaped(buffer.actions[t], model)), rtol=1e-6)
        stored = {k: v[t] for k, v in buffer.observations.items()} if isinstance(first, dict) else buffer.observations[t]
        for key, array in (observation if isinstance(first, dict) else {"": observation}).items():
            kept = stored[key] if key else stored
            # As the policy reads it, that is rounded to float32
            assert kept.dtype != np.float64
            np.testing.assert_array_equal(kept.ravel(), array.ravel().astype(kept.dtype))
        observation, starts = step["new_obs"], step["dones"]
    expected.rewards, expected.values, expected.episode_starts = buffer.rewards, buffer.values, buffer.episode_starts
    with th.no_grad():
        last_values = policy.predict_values(policy.obs_to_tensor(observation)[0])
    expected.compute_returns_and_advantage(last_values, starts)
    np.testing.assert_allclose(buffer.advantages, expected.advantages, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(buffer.returns, expected.returns, rtol=1e-4, atol=1e-5)


def _shaped(actions, model):
    return (
        actions.flatten()
        if isinstance(model.action_space, spaces.Discrete)
        else actions.reshape(-1, *model.action_space.shape)
    )


def test_samples_of_beta():
    """From the same random numbers, the extension module samples what NumPy does, also far out and for extreme numbers."""
    env = dict(action_space=spaces.Box(-1, 1, (3,), np.float32))
    distribution = make(action_dist="beta", env=env)._find_engine().native.distribution
    outputs = np.random.default_rng(0).normal(0, 20, size=(200, 6)).astype(np.float32)
    noise = distribution.noise(1, 200, 6)[0]
    noise[:9, 0] = -30  # No proposal is accepted.
    sampled = distribution.sampler()(outputs, noise)
    np.testing.assert_allclose(sampler_of(distribution)(outputs, noise), sampled, rtol=1e-6)
    assert np.ptp(sampled) > 0.99


def test_callbacks_that_read_estimates_find_them():
    """Values and log probabilities of the step, under SB3's names; the buffer has those of the steps before."""
    model, recorder = make(), RolloutRecorder()
    model.learn(64, callback=recorder)
    for name in ("values", "log_probs", "actions"):
        seen = np.stack([np.asarray(step[name]).reshape(2, -1) for step in recorder.steps])
        stored = np.concatenate([rollout[name].reshape(16, 2, -1) for rollout in recorder.rollouts])
        np.testing.assert_allclose(seen, stored, rtol=1e-6)
    observed = th.cat([step["obs_tensor"] for step in recorder.steps]).numpy()
    np.testing.assert_array_equal(
        observed, np.concatenate([r["observations"] for r in recorder.rollouts]).reshape(observed.shape)
    )
    assert [step["n_steps"] for step in recorder.steps] == [*range(16)] * 2


def test_callback_that_changes_the_policy():
    """
    From a change in the middle of a rollout on, actions are those of the new policy; what was taken before has the estimates
    of the old one.
    """

    class Setter(BaseCallback):
        def _on_step(self):
            if self.n_calls == 10:
                with th.no_grad():
                    for parameter in self.model.policy.parameters():
                        parameter.add_(0.1)
                    self.model.policy.action_net.bias.fill_(100.0)
                    self.model.policy.log_std.fill_(-2.0)
            return True

    model = make(env=dict(p_end=0.0))
    _, callback = model._setup_learn(10**6, Setter())
    before = copy.deepcopy(model.policy)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
    buffer = model.rollout_buffer
    assert (buffer.actions[:10] < 50).all()
    assert (buffer.actions[10:] > 50).all()
    for policy, steps in ((before, slice(10)), (model.policy, slice(10, None))):
        observations, actions = (th.from_numpy(array[steps]).flatten(0, 1) for array in (buffer.observations, buffer.actions))
        with th.no_grad():
            values, log_probs, _ = policy.evaluate_actions(observations, actions)
            normal = policy.get_distribution(observations).distribution
        assert 0.5 < ((actions - normal.mean) / normal.stddev).std() < 1.5
        np.testing.assert_allclose(buffer.values[steps].ravel(), values.flatten().numpy(), rtol=1e-5)
        np.testing.assert_allclose(buffer.log_probs[steps].ravel(), log_probs.numpy(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("n_envs", [1, 5])
@pytest.mark.parametrize("options", [dict(), dict(sde_sample_freq=4), dict(policy_kwargs=dict(squash_output=True))], ids=str)
def test_exploration_of_gsde(n_envs, options):
    """The whole rollout is the reference's, although a callback changes the noise in the middle; so is what follows it."""

    class Wider(BaseCallback):
        def _on_step(self):
            if self.n_calls == 6:
                with th.no_grad():
                    self.model.policy.log_std.fill_(-1.0)
            return True

    models = []
    for backend in ("eager", "native"):
        model = make(env=dict(n_envs=n_envs), backend=backend, use_sde=True, n_epochs=1, batch_size=16 * n_envs, **options)
        model.policy.log_std.data.fill_(-2.0)
        _, callback = model._setup_learn(10**6, Wider())
        th.manual_seed(0)
        model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
        models.append(model)
    eager, native = models
    for name in RolloutRecorder.ARRAYS:
        expected, actual = (getattr(model.rollout_buffer, name) for model in models)
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4, err_msg=name)
    for name in ("exploration_mat", "exploration_matrices"):
        assert th.equal(*(getattr(model.policy.action_dist, name) for model in models)), name
    np.testing.assert_allclose(native.predict(native._last_obs)[0], eager.predict(eager._last_obs)[0], rtol=1e-5, atol=1e-6)


def test_first_ratios_of_gsde():
    """Before the first step the ratios are 1: rollout and update evaluate the same distribution."""
    model = make(use_sde=True, n_epochs=1, batch_size=32).learn(32)
    logged = model.logger.name_to_value
    assert logged["train/ratio_mean"] == pytest.approx(1, abs=1e-6)
    assert logged["train/ratio_max"] == pytest.approx(1, abs=1e-5)


def test_whose_code_runs():
    """Callbacks of SB3 itself, however nested, are known; anybody else's, replaced methods included, are told from them."""

    class OfASimilarName(Silent):
        __module__ = "stable_baselines3_of_mine"

    class Subclass(EvalCallback):
        pass

    plain = [EvalCallback(ToyEnv()), EveryNTimesteps(5, EvalCallback(ToyEnv())), CallbackList([EvalCallback(ToyEnv())])]
    assert not any(map(runs_user_code, plain))
    nested = EvalCallback(ToyEnv(), callback_on_new_best=Silent()), EvalCallback(ToyEnv(), callback_after_eval=Silent())
    replaced = EvalCallback(ToyEnv())
    replaced._on_step = lambda: True
    own = Silent(), OfASimilarName(), Subclass(ToyEnv()), replaced, *nested
    for callback in (*own, EveryNTimesteps(5, Silent()), CallbackList([plain[0], Silent()]), ConvertCallback(lambda *_: True)):
        assert runs_user_code(callback), callback
    seen = []
    make().learn(16, callback=lambda local, _: seen.append(local["values"]) or True)
    assert seen[0].shape == (2, 1)


@pytest.mark.parametrize("stop_at", [5, 16, 20])
def test_callback_that_stops(stop_at):
    """The training stops at the same step as the reference, with the same counts."""
    models = [make(backend=backend).learn(96, callback=RolloutRecorder(stop_at)) for backend in ("eager", "native")]
    assert models[0].num_timesteps == models[1].num_timesteps
    assert models[0]._n_updates == models[1]._n_updates


@pytest.mark.parametrize("backend", ["native", "eager", "fused"])
@pytest.mark.parametrize("action_dist", ["gaussian", "squashed_gaussian", "beta", None])
def test_policy_that_is_not_finite(action_dist, backend):
    """No action of a policy that is not finite gets to the environment, and the counts of the rollout are taken back."""
    space = None if action_dist else spaces.Discrete(3)
    options = dict(action_dist=action_dist or "gaussian", backend=backend)
    model = make(dict(action_space=space) if space else {}, **options).learn(32)

    class Break(BaseCallback):
        def _on_step(self):
            if self.n_calls == 4:
                with th.no_grad():
                    self.model.policy.action_net.bias[0] = math.nan
            return True

    # Other engines see the latents of a bounded distribution alone.
    with pytest.raises(NonFinitePolicyError, match=r"step 4 of the rollout.*action_net.bias|2 of 4 numbers in the policy's"):
        model.learn(32, callback=Break(), reset_num_timesteps=False)
    assert model.num_timesteps == 32


@pytest.mark.parametrize("policy", ["MlpPolicy", "MultiInputPolicy", "MlpTransformerPolicy"])
def test_observations_are_kept_in_float32(policy):
    """Observations in float64 are kept as the policy reads them; the reference keeps them as SB3 does."""
    space = spaces.Box(-1.0, 1.0, (3,), np.float64)
    space = spaces.Dict({"joints": space, "gear": spaces.Discrete(3)}) if policy == "MultiInputPolicy" else space
    for backend in ("auto", "eager"):
        model = make(dict(observation_space=space), policy, backend=backend).learn(32)
        kept = model.rollout_buffer.observations
        kept = kept["joints"] if policy == "MultiInputPolicy" else kept
        is_reference = backend == "eager" and policy != "MlpTransformerPolicy"
        assert kept.dtype == (np.float64 if is_reference else np.float32)
        assert kept.any()


READ = spaces.Dict(
    image=spaces.Box(0, 255, (3, 4, 4), np.uint8),
    matrix=spaces.Box(-1, 1, (2, 3), np.float64),
    counts=spaces.MultiDiscrete([3, 2]),
    flags=spaces.MultiBinary([2, 2]),
    gear=spaces.Discrete(4),
)


def test_inputs():
    """What the networks read of observations is what SB3's policies make of them, to the bit; others are refused."""
    READ.seed(0)
    batch = [READ.sample() for _ in range(7)]
    observations = {key: np.stack([each[key] for each in batch]) for key in READ.spaces}
    preprocessed = preprocess_obs(obs_as_tensor(observations, th.device("cpu")), READ)
    expected = {key: preprocessed[key].flatten(1).numpy() for key in READ.spaces}
    for key, part in READ.spaces.items():
        np.testing.assert_array_equal(Inputs(part, None, True)(observations[key]), expected[key])
    found = pickle.loads(pickle.dumps(Inputs(READ, list(READ.spaces), True)))(observations)
    np.testing.assert_array_equal(found, np.concatenate(list(expected.values()), axis=1))
    # A buffer may keep images as float32, which stay as they are.
    pixels = observations["image"].astype(np.float32)
    np.testing.assert_array_equal(Inputs(READ["image"], None, True)(pixels), expected["image"])
    np.testing.assert_array_equal(pixels, observations["image"])
    for gear in (-1, 4):
        with pytest.raises(ValueError, match=rf"from 0 to less than \[4\], not \[{gear}\]"):
            Inputs(READ["gear"], None, True)(np.array([0, gear]))


def test_vec_normalize():
    """VecNormalize sees each step once, and the rollout is normalised."""
    model = PPOExt("MlpPolicy", VecNormalize(make_toys()), backend="native", **SMALL).learn(64)
    assert model.env.obs_rms.count == pytest.approx(2 * 33, abs=1e-3)
    assert abs(model.rollout_buffer.observations.mean()) < 0.5
