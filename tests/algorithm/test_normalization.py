"""Normalisation inside the model: what VecNormalize computes, to the bit, while everything else has raw observations."""

import warnings
from copy import deepcopy

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import VecNormalize
from support.cases import one_in
from support.hybrid import SPACES
from support.masks import make_masked
from support.parity import CLOCK, assert_equal
from support.torch_envs import TorchPendulum
from support.toys import DICT, IMAGE, VECTOR, LogRecorder, ToyEnv, make_toys

from sb3_ppo_ext import (
    MlpPolicy,
    MlpTransformerPolicy,
    ParallelVecEnv,
    PPOExt,
    TensorVecNormalize,
    TorchVecEnv,
    TrainingCheckpoint,
)
from sb3_ppo_ext.envs.normalizer import _moments

SMALL = dict(n_steps=16, batch_size=8, n_epochs=2, seed=3, device="cpu")
BOTH = dict(normalize_obs=True, normalize_reward=True)
VECTORS = spaces.Dict({"joints": VECTOR, "speed": spaces.Box(-1e3, 1e3, (2,), np.float64)})
WIDE = spaces.Box(-300.0, 900.0, (4,), np.float64)


class Recorder(BaseCallback):
    """Keeps the rollouts, and what the environments returned in the last step."""

    def __init__(self, stop_at=None):
        super().__init__()
        self.rollouts, self.stop_at = [], stop_at

    def _on_step(self):
        self.new_obs, self.rewards = deepcopy(self.locals["new_obs"]), self.locals["rewards"].copy()
        return self.n_calls != self.stop_at

    def _on_rollout_end(self):
        buffer, arrays = self.model.rollout_buffer, ("observations", "actions", "rewards", "values", "log_probs", "returns")
        self.rollouts.append({name: deepcopy(getattr(buffer, name)) for name in arrays})


def trained(model, callback=None, timesteps=64, rounds=1):
    """The model, the rollouts and what was logged."""
    log, callback = LogRecorder(), callback or Recorder()
    for number in range(rounds):
        model.set_logger(Logger(None, [log]))
        model.learn(timesteps, callback=callback, reset_num_timesteps=number == 0)
    logs = [{k: v for k, v in dump.items() if k not in CLOCK} for dump in log.dumps]
    return model, callback, logs


def statistics(normalizer):
    """Mean, variance and count of everything that has running statistics."""
    obs_rms = getattr(normalizer, "obs_rms", {})
    parts = {**(obs_rms if isinstance(obs_rms, dict) else {"": obs_rms}), "reward": normalizer.ret_rms}
    return {key: (np.array(part.mean), np.array(part.var), float(part.count)) for key, part in parts.items()}


def make(policy="MlpPolicy", env=None, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PPOExt(policy, make_toys() if env is None else env, **{**SMALL, **options})


def wrapped(env, gamma=0.99, **options):
    """SB3's normalisation of an environment, from the options of the model."""
    keys = options.get("normalize_obs")
    return VecNormalize(
        env,
        norm_obs=bool(keys),
        norm_obs_keys=keys if isinstance(keys, list) else None,
        norm_reward=options.get("normalize_reward", False),
        gamma=gamma,
        **{name: options[name] for name in ("clip_obs", "clip_reward") if name in options},
    )


def test_returns_of_episodes_that_end_while_nothing_is_learned():
    """They do not reach into the episodes after them, as in VecNormalize."""
    found = []
    for own in (True, False):
        env = make_toys(1) if own else wrapped(make_toys(1), normalize_reward=True)
        model = make(env=env, normalize_reward=own, backend="eager")
        normalizer = model.normalizer if own else env
        for training in (True, False, True):
            normalizer.training = training
            model.learn(24, reset_num_timesteps=False)
        found.append((float(normalizer.ret_rms.mean), float(normalizer.ret_rms.var), float(normalizer.ret_rms.count)))
    assert found[0] == found[1]


def test_parameters_without_statistics():
    """They are refused where observations would be normalised with those of other networks, but not by a new model."""
    plain, normalizing = make().learn(32), make(**BOTH)
    normalizing.set_parameters(plain.get_parameters())
    normalizing.learn(32)
    before = normalizing.get_parameters()
    with pytest.raises(ValueError, match=r"`normalize_obs=True` is not valid: the parameters are of a model that does not"):
        normalizing.set_parameters(plain.get_parameters())
    assert_equal(before, normalizing.get_parameters(), "parameters")
    normalizing.set_parameters(plain.get_parameters(), exact_match=False)
    normalizing.set_parameters(before)


CASES = {
    "box": ({}, BOTH, {}),
    "float64": (dict(observation_space=WIDE), BOTH, {}),
    "observations": ({}, dict(normalize_obs=True, clip_obs=0.7), {}),
    "rewards": ({}, dict(normalize_reward=True, clip_reward=0.3), {}),
    "discrete": (dict(action_space=spaces.Discrete(4)), BOTH, {}),
    "keys": (
        dict(observation_space=DICT),
        dict(normalize_obs=["joints"], normalize_reward=True),
        dict(policy="MultiInputPolicy"),
    ),
    "dict": (dict(observation_space=VECTORS), BOTH, dict(policy="MultiInputPolicy")),
    "sde": ({}, BOTH, dict(use_sde=True, sde_sample_freq=4)),
    "discount": ({}, BOTH, dict(gamma=0.5, gae_lambda=0.7)),
    "stopped": ({}, BOTH, dict(stop_at=29)),
    "image": (dict(observation_space=IMAGE), dict(normalize_reward=True), dict(policy="CnnPolicy")),
}


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("name", one_in(2, CASES))
def test_equal_to_ppo_with_vec_normalize(name):
    """Rollouts, parameters, statistics and logs are those of SB3's PPO with VecNormalize, to the bit."""
    env, options, further = CASES[name]
    further = {**SMALL, "policy": "MlpPolicy", **further}
    stop_at = further.pop("stop_at", None)
    rounds = 2 if name == "box" else 1
    normalized = wrapped(make_toys(**env), further.get("gamma", 0.99), **options)
    expected, theirs, their_logs = trained(PPO(env=normalized, **further), Recorder(stop_at), rounds=rounds)
    model = PPOExt(env=make_toys(**env), backend="eager", **options, **further)
    actual, ours, our_logs = trained(model, Recorder(stop_at), rounds=rounds)
    assert_equal(expected.policy.state_dict(), actual.policy.state_dict(), "policy")
    assert_equal(expected.policy.optimizer.state_dict(), actual.policy.optimizer.state_dict(), "optimizer")
    assert_equal(theirs.rollouts, ours.rollouts, "rollouts")
    assert_equal(statistics(normalized), statistics(actual.normalizer), "statistics")
    assert_equal(normalized.returns, actual.normalizer.returns, "returns")
    own = [{k: v for k, v in ours.items() if k in theirs} for theirs, ours in zip(their_logs, our_logs, strict=True)]
    assert_equal(their_logs, own, "logs")
    # What the callbacks and the environments have is raw.
    if name not in ("image", "keys"):  # which are transposed outside of `VecNormalize`
        assert_equal(normalized.get_original_obs(), ours.new_obs, "new_obs")
    assert_equal(normalized.get_original_reward(), ours.rewards, "rewards")
    normalized.training = normalized.norm_reward = False
    if stop_at is None:
        assert_equal(expected._last_obs, actual._normalized(actual._last_obs), "_last_obs")
        returns = []
        for model, env in ((expected, normalized), (actual, actual.env)):
            env.seed(5)
            returns.append(evaluate_policy(model, env, 2, warn=False))
        assert returns[0] == returns[1]


def two_toys(**kwargs):
    return lambda: make_toys(**kwargs)


MEMORY = dict(policy="MlpTransformerPolicy", policy_kwargs=dict(d_model=8, n_heads=1, n_layers=1, context_length=4))
LAST_REWARD = MEMORY | dict(policy_kwargs=MEMORY["policy_kwargs"] | dict(use_last_reward=True))
MIRROR = dict(mirror=dict(coef=1.0, obs=[0, [1, -1], 2], action=[[0, -1], 1]))
POLICIES = {
    "fused": (two_toys(), {}),
    "native": (two_toys(), dict(action_dist="beta")),
    "device": (two_toys(), {}),
    "native, float64": (two_toys(observation_space=WIDE, p_end=0.3), {}),
    "fused, transformer": (two_toys(), MEMORY),
    "device, last reward": (two_toys(), LAST_REWARD),
    "device, LSTM": (two_toys(), dict(policy="MlpLstmPolicy", policy_kwargs=dict(lstm_hidden_size=4))),
    "native, masks": (lambda: make_masked(observation_space=WIDE), dict(action_masking=True)),
    "device, masks": (lambda: make_masked(observation_space=WIDE), dict(action_masking=True)),
    "native, hybrid": (two_toys(action_space=SPACES["boxes"]), {}),
    "fused, asymmetric": (
        two_toys(observation_space=VECTORS),
        dict(policy="MultiInputPolicy", policy_kwargs=dict(actor_keys=["speed"])),
    ),
    "eager, vtrace": (two_toys(), dict(vtrace=True)),
    "fused, mirror": (two_toys(), dict(auxiliary_losses=MIRROR)),
}


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("name", POLICIES)
def test_every_engine_and_policy(name):
    """Each engine trains with the model's normalisation as it does with VecNormalize, to the bit."""
    make_env, further = POLICIES[name]
    further = further | dict(backend=name.split(",")[0])
    env = wrapped(make_env(), **BOTH)
    expected = make(env=env, **further).learn(64)
    actual = make(env=make_env(), **BOTH, **further).learn(64)
    assert_equal(expected.policy.state_dict(), actual.policy.state_dict(), "policy")
    assert_equal(statistics(env), statistics(actual.normalizer), "statistics")


@pytest.mark.parametrize("options", [BOTH, dict(normalize_reward=True)])
def test_last_rewards(options, tmp_path):
    """`predict` gets rewards of the environments, and the policy reads them as in the training."""
    model = make(env=make_toys(), **options, **LAST_REWARD).learn(64)
    model.save(tmp_path / "model")
    model.policy.save(tmp_path / "policy")
    observations, rewards = np.array([[[0.5, -2, 3]], [[1, 1, -1]]], np.float32).repeat(2, axis=1), np.float32([0.3, -700])
    read = model.normalizer.rewards(rewards)
    assert abs(read[0] / rewards[0] - 1) > 0.01
    assert read[1] == -10

    def actions(predicting, rewards, normalized=lambda part: part):
        _, state = predicting.predict(normalized(observations[0]), deterministic=True)
        predicted, after = predicting.predict(normalized(observations[1]), state.with_rewards(rewards), deterministic=True)
        np.testing.assert_allclose(after.last_rewards[:, -2], read)
        return predicted

    expected = actions(model, rewards)
    for loaded in (PPOExt.load(tmp_path / "model"), MlpTransformerPolicy.load(tmp_path / "policy")):
        np.testing.assert_array_equal(actions(loaded, rewards), expected)
    normalizer, model.policy.normalizer = model.policy.normalizer, None
    np.testing.assert_array_equal(actions(model, read, normalizer.observations), expected)


@pytest.mark.parametrize("backend", ["native", "device"])
def test_every_engine_with_a_callback(backend):
    """With callbacks that may read everything, which then have raw observations, the numbers are the same."""
    env = wrapped(make_toys(), **BOTH)
    expected, theirs, _ = trained(make(env=env, backend=backend))
    actual, ours, _ = trained(make(backend=backend, **BOTH))
    assert_equal(theirs.rollouts, ours.rollouts, "rollouts")
    assert_equal(expected.policy.state_dict(), actual.policy.state_dict(), "policy")
    assert_equal(env.get_original_obs(), ours.new_obs, "new_obs")


def pendulums():
    env = TorchVecEnv(TorchPendulum(5, max_episode_steps=7))
    env.seed(0)
    return env


@pytest.mark.parametrize(("policy", "watched"), [("MlpPolicy", True), ("MlpTransformerPolicy", False)])
def test_tensor_environments(policy, watched):
    """With environments that step in tensors, it is TensorVecNormalize, to the bit."""
    policy_kwargs = MEMORY["policy_kwargs"] if policy == MEMORY["policy"] else {}
    env, callback = TensorVecNormalize(pendulums()), [Recorder(), Recorder()] if watched else [None, None]
    expected = make(policy, env, policy_kwargs=policy_kwargs).learn(160, callback=callback[0])
    actual = make(policy, pendulums(), policy_kwargs=policy_kwargs, **BOTH).learn(160, callback=callback[1])
    assert_equal(expected.policy.state_dict(), actual.policy.state_dict(), "policy")
    assert_equal(statistics(env), statistics(actual.normalizer), "statistics")
    assert_equal(env.old_obs, actual._last_obs, "_last_obs")
    if watched:
        assert_equal(callback[0].rollouts, callback[1].rollouts, "rollouts")
        assert_equal(env.old_reward, callback[1].rewards, "rewards")


# What has raw observations


def test_policies_take_raw_observations_and_are_saved_with_the_statistics(tmp_path):
    """``predict`` and ``obs_to_tensor`` normalise, also of a policy, a copy of it, and one that was saved alone."""
    model = make(**BOTH).learn(64)
    observations = np.float32([[0.1, 0.9, -0.5], [1, 1, 1]])
    inputs = th.as_tensor(model.normalizer.observations(observations))
    with th.no_grad():
        expected = model.policy.get_distribution(inputs).mode().numpy()
    model.policy.save(tmp_path / "policy.pth")
    model.save(tmp_path / "model.zip")
    policies = [MlpPolicy.load(tmp_path / "policy.pth", trusted=trusted) for trusted in (True, False)]
    models = [PPOExt.load(tmp_path / "model.zip", trusted=trusted) for trusted in (True, False)]
    expected = np.clip(expected, [-1, -2], [1, 3])
    for each in (model, model.policy, deepcopy(model.policy), *policies, *models):
        np.testing.assert_array_equal(each.predict(observations, deterministic=True)[0], expected)
        np.testing.assert_allclose(each.predict(observations[0], deterministic=True)[0], expected[0], rtol=1e-5)
        policy = getattr(each, "policy", each)
        assert th.equal(policy.obs_to_tensor(observations)[0], inputs)
    for each in models:
        assert_equal(statistics(model.normalizer), statistics(each.normalizer), "statistics")
        assert each.policy.normalizer is each.normalizer


def test_masked_observations_are_normalised_by_predict():
    """So are those that get a mask, in ``predict``."""
    model = make(env=make_masked(observation_space=WIDE), action_masking=True, **BOTH).learn(32)
    observation, mask = WIDE.sample(), np.array([False, False, True, False, True])
    raw, _ = model.policy.obs_to_tensor({"observation": observation, "action_mask": mask})
    np.testing.assert_array_equal(raw["observation"][0], model.normalizer.observations(observation))
    assert model.predict(observation, action_masks=mask)[0] in (2, 4)


@pytest.mark.parametrize("shape", [(1,), (), (4,), (3, 1), (1, 1), (2, 3, 3)])
def test_observations_of_another_shape(shape):
    """They are refused as by SB3, instead of being broadcast against the statistics."""
    model, theirs = make(**BOTH), PPO("MlpPolicy", make_toys(), **SMALL)
    messages = []
    for each in (theirs, model, model.policy):
        with pytest.raises(ValueError, match="Unexpected observation shape") as error:
            each.predict(np.zeros(shape, np.float32))
        messages.append(str(error.value))
    assert len(set(messages)) == 1


def test_observations_that_are_no_dictionary():
    """They are refused where the policy reads dictionaries, and so are parts of another shape."""
    model = make("MultiInputPolicy", make_toys(observation_space=VECTORS), **BOTH)
    for observation in (np.zeros(3, np.float32), {"joints": np.zeros(3, np.float32), "speed": np.zeros(1)}):
        with pytest.raises(ValueError, match="Unexpected observation"):
            model.predict(observation)


@pytest.mark.integration
def test_export_has_the_statistics(tmp_path):
    """The file takes raw observations; statistics of a VecNormalize as well are refused."""
    model = make(env=make_toys(observation_space=WIDE), **BOTH).learn(64)
    model.export(tmp_path / "policy.pt")
    observation = WIDE.sample().astype(np.float32)[np.newaxis]
    action = th.export.load(tmp_path / "policy.pt").module()(th.as_tensor(observation))[0]
    np.testing.assert_allclose(
        action.detach().numpy(), model.predict(observation, deterministic=True)[0], rtol=1e-4, atol=1e-5
    )
    with pytest.raises(ValueError, match=r"vec_normalize=.*statistics of its own"):
        model.export(tmp_path / "policy.pt", vec_normalize=VecNormalize(make_toys(observation_space=WIDE)))


def test_integers_are_not_rounded():
    """Normalised integers are stored as floats, also on the engine that otherwise stores what SB3 stores."""
    model = make(env=make_toys(observation_space=spaces.Box(-9, 9, (4,), np.int32)), backend="eager", **BOTH).learn(32)
    observations = model.rollout_buffer.observations
    assert observations.dtype == np.float32
    assert (observations != np.round(observations)).any()


# Files of VecNormalize, zips, checkpoints


@pytest.mark.parametrize("space", [VECTOR, VECTORS], ids=["box", "dict"])
def test_files_of_vec_normalize(space, tmp_path):
    """Statistics are taken from, and written to, files of VecNormalize."""
    policy = "MlpPolicy" if space is VECTOR else "MultiInputPolicy"
    model = make(policy, make_toys(observation_space=space), clip_obs=3.0, gamma=0.9, **BOTH).learn(64)
    model.save_vec_normalize(tmp_path / "statistics.pkl")
    loaded = VecNormalize.load(str(tmp_path / "statistics.pkl"), make_toys(observation_space=space))
    assert_equal(statistics(model.normalizer), statistics(loaded), "statistics")
    assert (loaded.clip_obs, loaded.gamma, loaded.norm_obs, loaded.norm_reward) == (3.0, 0.9, True, True)
    observation = space.sample()
    assert_equal(loaded.normalize_obs(observation), model.normalizer.observations(observation), "observation")
    for source in (loaded, tmp_path / "statistics.pkl"):
        other = make(policy, make_toys(observation_space=space), **BOTH)
        other.load_vec_normalize(source)
        assert_equal(statistics(loaded), statistics(other.normalizer), "statistics")


def test_an_old_model_with_its_file(tmp_path):
    """A model of SB3 that was trained with VecNormalize acts on raw observations with its statistics."""
    env = VecNormalize(make_toys())
    PPO("MlpPolicy", env, **SMALL).learn(64).save(tmp_path / "old.zip")
    env.save(tmp_path / "old.pkl")
    model = PPOExt.load(tmp_path / "old.zip", make_toys(), normalize_obs=True, normalize_reward=True)
    model.load_vec_normalize(tmp_path / "old.pkl")
    observation = VECTOR.sample()
    expected = PPO.load(tmp_path / "old.zip").predict(env.normalize_obs(observation), deterministic=True)[0]
    np.testing.assert_array_equal(model.predict(observation, deterministic=True)[0], expected)


def test_other_algorithms_say_that_they_cannot_load_it(tmp_path):
    """SB3's PPO.load names the options, since its policy would read raw observations as if they were normalised."""
    make(**BOTH).save(tmp_path / "model.zip")
    with pytest.raises(ValueError, match=r"`normalize_obs=True` and `normalize_reward=True`.*PPOExt\.load"):
        PPO.load(tmp_path / "model.zip")


def test_set_parameters_takes_the_statistics_along():
    """Statistics are among the parameters of a model."""
    model, other = make(**BOTH).learn(64), make(**BOTH)
    other.set_parameters(model.get_parameters())
    assert_equal(statistics(model.normalizer), statistics(other.normalizer), "statistics")
    assert other.policy.normalizer is other.normalizer


def test_parameters_without_their_statistics():
    """Networks that have learned from normalised observations are not put into a model that does not normalise."""
    parameters = make(**BOTH).learn(32).get_parameters()
    model = make()
    with pytest.raises(ValueError, match=r"normalize_obs=False.*make this one with `normalize_obs=True`"):
        model.set_parameters(parameters)
    model.set_parameters(make(normalize_reward=True).learn(32).get_parameters())


def test_a_policy_in_the_place_of_the_models():
    """It has the statistics of the model from the next rollout on, so that it acts on what it is trained with."""
    model = make(**BOTH).learn(32)
    model.policy = deepcopy(model.policy)
    model.learn(32)
    assert model.policy.normalizer is model.normalizer


class Interrupt(BaseCallback):
    def _on_step(self):
        if self.num_timesteps >= 100:
            raise KeyboardInterrupt
        return True


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("freq", ["step", "rollout"])
def test_resuming_is_exact(freq, tmp_path):
    """A training that is resumed from a checkpoint ends with the same parameters and statistics, to the bit."""

    def model_and_checkpoints(folder):
        return make(normalize_freq=freq, **BOTH), TrainingCheckpoint(32, folder)

    expected, checkpoint = model_and_checkpoints(tmp_path / "whole")
    expected.learn(160, callback=checkpoint)
    model, checkpoint = model_and_checkpoints(tmp_path / "parts")
    with pytest.raises(KeyboardInterrupt):
        model.learn(160, callback=[checkpoint, Interrupt()])
    resumed = PPOExt.resume(tmp_path / "parts", make_toys())
    resumed.learn(160, callback=TrainingCheckpoint(32, tmp_path / "parts"))
    assert_equal(expected.policy.state_dict(), resumed.policy.state_dict(), "policy")
    assert_equal(statistics(expected.normalizer), statistics(resumed.normalizer), "statistics")
    assert_equal(expected.normalizer.returns, resumed.normalizer.returns, "returns")


# Statistics of earlier rollouts


class Frozen(BaseCallback):
    """Keeps the statistics at the first and the last step of each rollout, and the raw observations."""

    def __init__(self):
        super().__init__()
        self.seen, self.observations = [], []

    def _on_step(self):
        self.seen.append(statistics(self.model.normalizer))
        self.observations.append(self.locals["new_obs"].copy())
        return True


def test_statistics_of_earlier_rollouts():
    """With "rollout", the statistics change at each step of the first rollout, and then after the update of each."""
    model, callback = make(normalize_freq="rollout", **BOTH), Frozen()
    model.learn(96, callback=callback)
    same = [str(a) == str(b) for a, b in zip(callback.seen[:-1], callback.seen[1:], strict=True)]
    assert same == [False] * 15 + [True] * 16 + [False] + [True] * 15
    # All observations have the same weight.
    rows = np.concatenate(callback.observations).astype(np.float64)
    first = 2 + 1e-4  # The reset, and the count that `RunningMeanStd` begins with
    mean, _, count = statistics(model.normalizer)[""]
    assert count == pytest.approx(len(rows) + first)
    stepwise = make(normalize_freq="step", **BOTH)
    stepwise.normalizer.obs_rms.update(rows)
    np.testing.assert_allclose(mean, stepwise.normalizer.obs_rms.mean, atol=0.05)


def test_the_first_rollout_is_that_of_vec_normalize():
    """Until the first update, there is no difference between both."""
    recorders = [trained(make(backend="eager", normalize_freq=freq, **BOTH))[1] for freq in ("step", "rollout")]
    first, second = (recorder.rollouts for recorder in recorders)
    assert_equal(first[0], second[0], "rollout")
    assert (first[1]["observations"] != second[1]["observations"]).any()


def test_fixed_statistics():
    """``training = False`` keeps the statistics, as that of VecNormalize."""
    model = make(**BOTH).learn(32)
    model.normalizer.training, before = False, statistics(model.normalizer)
    model.learn(32)
    assert_equal(before, statistics(model.normalizer), "statistics")


def test_fixed_statistics_stay_fixed(tmp_path):
    """Also when an option has been changed, in a zip and in a policy's file; a zip of before says nothing of it."""
    model = make(**BOTH).learn(32)
    model.normalizer.training, before = False, statistics(model.normalizer)
    model.clip_obs = 5.0
    model.learn(32).save(tmp_path / "model")
    model.policy.save(tmp_path / "policy")
    loaded = PPOExt.load(tmp_path / "model", env=make_toys())
    for each in (model, loaded):
        assert each.normalizer.clip_obs == 5.0
        each.learn(32)
        assert_equal(before, statistics(each.normalizer), "statistics")
    assert not MlpPolicy.load(tmp_path / "policy").normalizer.training
    parameters = model.get_parameters()
    del parameters["normalizer"]["training"]
    model.set_parameters(parameters)
    assert model.normalizer.training


def test_a_changed_option_goes_on_with_the_episodes():
    """The discounted returns of running episodes are those of a training without the change."""
    found = []
    for clip_obs in (10.0, 9.0):  # which no observation reaches
        model = make(**BOTH).learn(32)
        model.clip_obs = clip_obs
        found.append(statistics(model.learn(32, reset_num_timesteps=False).normalizer))
    assert_equal(*found, "statistics")


@pytest.mark.integration
@pytest.mark.parametrize("n_workers", [1, 2])
def test_environments_need_not_wait_for_each_other(n_workers, monkeypatch):
    """With statistics of earlier rollouts, overlapped collection has the same results as stepping together."""
    collected = []
    collect = ParallelVecEnv.collect
    monkeypatch.setattr(ParallelVecEnv, "collect", lambda *args: collected.append(1) or collect(*args))
    models = []
    for overlap in (True, False):
        env = ParallelVecEnv([lambda: Monitor(ToyEnv())] * 5, n_workers=n_workers, overlap=overlap, start_method="fork")
        models.append(make(env=env, backend="native", normalize_freq="rollout", **BOTH).learn(320))
        env.close()
    assert len(collected) == 3  # all rollouts but the first
    one, other = models
    assert_equal(other.policy.state_dict(), one.policy.state_dict(), "policy")
    assert_equal(other.rollout_buffer.observations, one.rollout_buffer.observations, "observations")
    assert_equal(other.rollout_buffer.rewards, one.rollout_buffer.rewards, "rewards")
    assert_equal(statistics(other.normalizer), statistics(one.normalizer), "statistics")
    assert_equal(other._last_obs, one._last_obs, "_last_obs")


# Bad input


@pytest.mark.parametrize(
    ("env", "options", "message"),
    [
        ({}, dict(normalize_obs="joints"), "normalize_obs='joints'.*True or False"),
        ({}, dict(normalize_obs=[]), r"normalize_obs=\[\]"),
        ({}, dict(normalize_obs=["joints"]), "keys are for `Dict` observations"),
        (dict(observation_space=IMAGE), BOTH, "are images"),
        (dict(observation_space=spaces.Discrete(4)), BOTH, "no numbers on a scale"),
        (dict(observation_space=DICT), dict(normalize_obs=["camera"]), "'camera': .*images.*give \\['joints'\\]"),
        (dict(observation_space=DICT), dict(normalize_obs=["gear"]), "'gear'"),
        (dict(observation_space=DICT), dict(normalize_obs=["knees"]), "no 'knees': the keys are camera"),
        ({}, dict(clip_obs=0.0, **BOTH), "clip_obs=0.0"),
        ({}, dict(normalize_freq="epoch"), "normalize_freq='epoch'"),
    ],
)
def test_bad_options(env, options, message):
    """Values that cannot be used are refused by name, with what can be given."""
    policy = "MultiInputPolicy" if env.get("observation_space") is DICT else "MlpPolicy"
    with pytest.raises(ValueError, match=message):
        make(policy, make_toys(**env), **options)


def test_a_normaliser_given_twice():
    """A VecNormalize around the environments is refused at once, and when it is given later."""
    with pytest.raises(ValueError, match=r"normalize_obs=True.*`VecNormalize`"):
        make(env=VecNormalize(make_toys()), **BOTH)
    with pytest.raises(ValueError, match=r"normalize_reward=True.*`TensorVecNormalize`"):
        make(env=TensorVecNormalize(pendulums()), normalize_reward=True)
    model = make(**BOTH)
    with pytest.raises(ValueError, match=r"normalize_obs=True.*`VecNormalize`"):
        model.set_env(VecNormalize(make_toys()))
    model.env = VecNormalize(model.env)
    with pytest.raises(ValueError, match=r"normalize_obs=True.*`VecNormalize`"):
        model.learn(32)


def test_evaluation_that_normalises_as_well(tmp_path):
    """Observations of an `EvalCallback` are not normalised twice. What else its environment does is its own matter."""
    model = make(**BOTH)
    callback = EvalCallback(VecNormalize(make_toys(), training=False), eval_freq=16)
    with pytest.raises(ValueError, match=r"normalize_obs=True.*environment of the callback is in a `VecNormalize`"):
        model.learn(32, callback=[callback])
    make(normalize_reward=True).learn(32, callback=[callback])
    model.learn(32, callback=EvalCallback(VecNormalize(make_toys(), norm_obs=False), eval_freq=16))


def test_normalisation_cannot_be_changed_by_load(tmp_path):
    """The networks have learned from normalised observations."""
    make(**BOTH).save(tmp_path / "model")
    with pytest.raises(
        ValueError, match=r"normalize_obs=False.*was saved with `normalize_obs=True`, which `load` cannot change"
    ):
        PPOExt.load(tmp_path / "model", normalize_obs=False)
    assert PPOExt.load(tmp_path / "model", normalize_reward=False).normalize_obs


class Own(ActorCriticPolicy):
    """A user's policy"""


def _divided(self, observation):
    tensor, is_vectorized = super(type(self), self).obs_to_tensor(observation)
    return tensor / 10, is_vectorized


def test_conversion_of_a_users_policy():
    """It is applied to normalised observations where values are bootstrapped, as in SB3 with a VecNormalize."""
    theirs = PPO(
        type("TheirScaling", (ActorCriticPolicy,), {"obs_to_tensor": _divided}), wrapped(make_toys(), **BOTH), **SMALL
    )
    theirs.learn(64)
    ours = make(type("Scaling", (MlpPolicy,), {"obs_to_tensor": _divided}), backend="eager", **BOTH).learn(64)
    assert_equal(theirs.rollout_buffer.rewards, ours.rollout_buffer.rewards, "rewards")


class Ours(MlpPolicy):
    """A user's policy that inherits one of this package"""


def test_policies_of_users():
    """One that would act on observations as they are, after a training on normalised ones, is refused."""
    with pytest.raises(ValueError, match=r"normalize_obs=True.*`Own` would not normalise .*`sb3_ppo_ext.MlpPolicy`"):
        make(Own, **BOTH)
    make(Own, normalize_reward=True).learn(32)
    model = make(Ours, **BOTH).learn(32)
    observation = np.float32([[0.1, 0.9, -0.5]])
    assert_equal(model.policy.obs_to_tensor(observation)[0].numpy(), model.normalizer.observations(observation), "observation")


def with_nan():
    env = VecNormalize(make_toys())
    env.obs_rms.mean[1] = np.nan
    return env


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (lambda: VecNormalize(make_toys(observation_space=WIDE)), r"obs_rms.mean='of shape \(4,\)'"),
        (lambda: VecNormalize(make_toys(), norm_obs=False), "no statistics 'obs_rms'"),
        (lambda: VecNormalize(make_toys(observation_space=VECTORS)), "no statistics 'obs_rms'"),
        (with_nan, "not finite"),
        (lambda: 3, "vec_normalize=3"),
    ],
)
def test_bad_statistics(source, message):
    """Statistics that do not fit are refused by name, and the model's stay as they are."""
    model = make(**BOTH).learn(32)
    before = statistics(model.normalizer)
    with pytest.raises(ValueError, match=message):
        model.load_vec_normalize(source())
    assert_equal(before, statistics(model.normalizer), "statistics")
    with pytest.raises(ValueError, match="normalize_obs=False"):
        make().load_vec_normalize(VecNormalize(make_toys()))


def test_missing_statistics_of_a_part():
    """Of a dictionary, the part without statistics is named."""
    model = make("MultiInputPolicy", make_toys(observation_space=VECTORS), **BOTH)
    keys = list(model.normalizer.norm_obs_keys)
    assert len(keys) > 1
    source = VecNormalize(make_toys(observation_space=VECTORS), norm_obs_keys=keys[:1])
    with pytest.raises(ValueError, match=f"no statistics 'obs_rms.{keys[1]}'"):
        model.load_vec_normalize(source)


def test_statistics_of_a_refused_rollout():
    """After an observation that is not finite, the statistics are those before the rollout."""
    model = make(**BOTH).learn(32)
    before = statistics(model.normalizer)
    model.env.envs[0].unwrapped.step = lambda action: (np.full(3, np.nan, np.float32), 0.0, False, False, {})
    with pytest.raises(ValueError, match="observation"):
        model.learn(32, reset_num_timesteps=False)
    assert_equal(before, statistics(model.normalizer), "statistics")


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(1,), (1, 17), (4, 3), (16, 17), (7, 2, 3), (2048,)])
def test_moments(shape, dtype):
    """Means and variances of a batch are NumPy's, bit for bit."""
    rows = np.random.default_rng(0).normal(3, 1e3, size=shape).astype(dtype)
    mean, variance = _moments(rows)
    np.testing.assert_array_equal(mean, np.mean(rows, axis=0))
    np.testing.assert_array_equal(variance, np.var(rows, axis=0))
