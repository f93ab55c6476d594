"""Training with hybrid actions: equal to plain ones where there is one part, on all engines and environments, from zips."""

import itertools
import sys

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecMonitor, VecNormalize
from support.cases import one_in
from support.hybrid import ACTION, KICK, SPACES, Passing, TensorPassing, make_only_parts
from support.options import assert_continues, random_state, set_random_state
from support.parity import assert_equal, train
from support.toys import BOX_ACTION, DICT, ToyEnv, make_toys
from support.zips import Zip

from sb3_ppo_ext import (
    CheckedSubprocVecEnv,
    FastDummyVecEnv,
    MlpPolicy,
    ParallelVecEnv,
    PPOExt,
    VectorEnvAdapter,
)

pytestmark = pytest.mark.integration

SMALL = dict(n_steps=16, batch_size=16, n_epochs=2, seed=1, device="cpu", policy_kwargs=dict(net_arch=[8, 8]))
TRANSFORMER = dict(context_length=5, d_model=8, n_heads=2, use_last_action=True, use_last_reward=True)
MEMORY = {"MlpTransformerPolicy": TRANSFORMER, "MlpLstmPolicy": dict(lstm_hidden_size=8)}


def make(space=KICK, policy="MlpPolicy", env=None, **options):
    policy_kwargs = {**SMALL["policy_kwargs"], **MEMORY.get(policy, {}), **options.pop("policy_kwargs", {})}
    env = env or make_toys(action_space=space, length=5)
    return PPOExt(policy, env, **{**SMALL, **options, "policy_kwargs": policy_kwargs})


# The same as without a dictionary

PLAIN = {
    "box": dict(space=BOX_ACTION, ent_coef=0.01, bounds_coef=0.1, bounds_limit=0.1, kl_coef=0.3),
    "float64": dict(space=spaces.Box(-2.0, 2.0, (2,), np.float64), ent_coef=0.01),
    "squashed": dict(space=BOX_ACTION, action_dist="squashed_gaussian", bounds_coef=0.1, bounds_limit=0.1, ent_coef=0.01),
    "Beta": dict(space=BOX_ACTION, action_dist="beta", kl_coef=0.3, ent_coef=0.01),
    "mean_tanh": dict(space=BOX_ACTION, policy_kwargs=dict(mean_tanh=True)),
    "discrete": dict(space=spaces.Discrete(4), ent_coef=0.01, kl_coef=0.3),
    "multi-discrete": dict(space=spaces.MultiDiscrete([3, 2]), ent_coef=0.01, kl_coef=0.3),
    "multi-binary": dict(space=spaces.MultiBinary(3), ent_coef=0.01, kl_coef=0.3),
    "V-trace, segments": dict(space=BOX_ACTION, vtrace=True, priority_alpha=0.5, priority_segment=4, advantage_norm="ema"),
}


# As in RecurrentPPO, log probabilities of actions in float64 are in float64; vectors are in float32.
WITH_MEMORY = [pair for pair in itertools.product(PLAIN, MEMORY) if pair != ("float64", "MlpLstmPolicy")]


@pytest.mark.parametrize("case", [*one_in(2, [(case, "MlpPolicy") for case in PLAIN]), *one_in(4, WITH_MEMORY)], ids=", ".join)
def test_one_part_is_the_plain_space(case):
    """A dictionary with one part is trained as that part alone, bit for bit: rollouts, parameters, optimiser and logs."""
    name, policy = case
    options = {"backend": "eager", **PLAIN[name]}
    space = options.pop("space")
    plain = make(policy=policy, env=make_toys(action_space=space, length=5), **options)
    hybrid = make(policy=policy, env=make_only_parts(space, length=5), **options)
    hybrid.policy.load_state_dict(plain.policy.state_dict())
    state, runs = random_state(), []
    for model in (plain, hybrid):
        set_random_state(state)
        runs.append(train(model, 64))
    expected, actual = runs
    assert_equal(plain.policy.state_dict(), hybrid.policy.state_dict(), "policy")
    assert_equal(plain.policy.optimizer.state_dict(), hybrid.policy.optimizer.state_dict(), "optimizer")
    for one, other in zip(expected.recorder.rollouts, actual.recorder.rollouts, strict=True):
        for name, array in one.items():
            np.testing.assert_array_equal(np.asarray(array, float), np.asarray(other[name], float), err_msg=name)
    assert_equal(expected.logs, actual.logs, "logs")


# Engines and policies


def test_native_is_chosen():
    """The native engine supports hybrid actions, and is the default for them."""
    model = make(SPACES["all kinds"], backend="auto").learn(16)
    assert list(model._engines) == ["native"]


def test_last_action():
    """A transformer sees the last action: boxes scaled to [-1, 1], categories one-hot, and zeros and ones."""
    policy = make(SPACES["all kinds"], "MlpTransformerPolicy").policy
    vectors = policy.action_space.flattened([ACTION])
    expected = [0.25, -0.5, 0.25, 0, 1, 0, 0, 0, 1, 0, 0, 1, 0, 1]
    assert policy.n_action_features == len(expected)
    np.testing.assert_allclose(policy.encode_actions(vectors)[0], expected, atol=1e-6)
    np.testing.assert_allclose(policy.encode_action_tensors(th.from_numpy(vectors))[0], expected, atol=1e-6)


class ReadAll(BaseCallback):
    """Checks what callbacks read."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def _on_step(self):
        read = self.locals
        space = self.model.action_space
        assert len(read["env_actions"]) == 2
        assert all(space.contains(action) for action in read["env_actions"])
        flat = self.model.policy.action_space
        np.testing.assert_allclose(flat.flattened(read["env_actions"]), read["clipped_actions"], atol=1e-6)
        assert read["actions"].shape == (2, *flat.shape)
        self.seen.append(np.array(read["clipped_actions"]))
        return True

    def _on_rollout_end(self):
        actions = self.model.rollout_buffer.actions
        assert np.asarray(actions).shape[-1] == self.model.policy.action_space.shape[0]


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("action_dist", ["gaussian", "beta"])
def test_callbacks(action_dist, backend, tmp_path):
    """Callbacks read the actions of the environments and their vectors, evaluate the model, and keep the best one."""
    callback = ReadAll()
    evaluation = EvalCallback(
        make_toys(1, action_space=KICK), n_eval_episodes=1, eval_freq=8, best_model_save_path=str(tmp_path), verbose=0
    )
    model = make(action_dist=action_dist, backend=backend).learn(64, callback=[callback, evaluation])
    assert len(callback.seen) == 32
    assert np.ptp(np.array(callback.seen)[..., 2]) > 0
    best = PPOExt.load(tmp_path / "best_model.zip", device="cpu")
    assert KICK.contains(best.predict(np.zeros(3, np.float32))[0])
    assert len(evaluate_policy(model, make_toys(1, action_space=KICK), 2, return_episode_rewards=True)[0]) == 2


# Environments


def of_processes(cls, **kwargs):
    return lambda fns: cls(fns, **kwargs)


ENVIRONMENTS = {
    "FastDummyVecEnv": FastDummyVecEnv,
    "adapter": lambda fns: VecMonitor(VectorEnvAdapter(SyncVectorEnv(fns))),
    "adapter, same step": lambda fns: VecMonitor(VectorEnvAdapter(SyncVectorEnv(fns, autoreset_mode="SameStep"))),
}
IN_PROCESSES = {
    "SubprocVecEnv": of_processes(SubprocVecEnv, start_method="fork"),
    "CheckedSubprocVecEnv": of_processes(CheckedSubprocVecEnv, start_method="fork"),
    "ParallelVecEnv": of_processes(ParallelVecEnv, n_workers=1, start_method="fork"),
    "adapter, processes": lambda fns: VecMonitor(VectorEnvAdapter(AsyncVectorEnv(fns))),
}
forks = pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")


class Repeating(ToyEnv):
    """Observations that depend on its own generator alone, wherever it steps, and rewards that depend on each part."""

    def __init__(self, action_space):
        super().__init__(spaces.Box(-1.0, 1.0, (3,), np.float32), action_space, length=6)

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize(
    "kind", [*ENVIRONMENTS, *(pytest.param(name, marks=[pytest.mark.integration, forks]) for name in IN_PROCESSES)]
)
@pytest.mark.parametrize("name", one_in(2, ["nested", "all kinds"]))
def test_environments(name, kind):
    """Whatever steps the environments, the actions arrive, and the training is that of `DummyVecEnv`."""
    is_adapter = kind.startswith("adapter")

    def fns():
        one = (lambda: Repeating(SPACES[name])) if is_adapter else (lambda: Monitor(Repeating(SPACES[name])))
        return [one] * 3

    environments = []
    for make_env in (VecMonitorDummy if is_adapter else DummyVecEnv, {**ENVIRONMENTS, **IN_PROCESSES}[kind]):
        env = make_env(fns())
        environments.append(make(env=env, backend="eager").learn(96).policy.state_dict())
        env.close()
    assert_equal(*environments, "policy")


def VecMonitorDummy(fns):
    return VecMonitor(DummyVecEnv(fns))


def test_one_environment_of_gymnasium():
    """A single environment of Gymnasium is wrapped, and steps with what `predict` returns for it."""
    model = PPOExt("MlpPolicy", Passing(), **SMALL).learn(32)
    env = Passing()
    observation, _ = env.reset(seed=0)
    for _ in range(3):
        observation, *_ = env.step(model.predict(observation)[0])


def test_normalised_and_dictionaries():
    """`VecNormalize` and dictionaries of observations go with dictionaries of actions."""
    env = VecNormalize(make_toys(observation_space=DICT, action_space=KICK), norm_obs_keys=["joints"])
    make(policy="MultiInputPolicy", env=env).learn(32)


IN_TENSORS = itertools.product(["MlpPolicy", "MlpTransformerPolicy"], [False, True], ["gaussian", "beta"], ["eager", "device"])


@pytest.mark.parametrize("case", one_in(3, IN_TENSORS), ids=str)
def test_tensor_environments(case):
    """Environments that step in tensors get dictionaries or tuples of tensors, within their bounds."""
    policy, in_tuples, action_dist, backend = case
    env = TensorPassing(in_tuples=in_tuples)
    model = make(policy=policy, env=env, backend=backend, action_dist=action_dist).learn(256)
    mates, powers = (th.stack(parts) for parts in zip(*env.seen, strict=True))
    assert mates.dtype == th.int64
    assert set(mates.flatten().tolist()) == {0, 1, 2}
    assert powers.abs().max() <= 1
    assert powers.std() > 0.2
    actions, _ = model.predict(env.reset())
    assert len(actions) == 8
    env.step(actions)
    np.testing.assert_array_equal(env.seen[-1][0], [a[0] if in_tuples else a["mate"] for a in actions])


def test_tensor_environments_with_callbacks():
    """Callbacks read the same of environments in tensors."""

    class Reader(BaseCallback):
        def _on_step(self):
            assert all(self.model.action_space.contains(action) for action in self.locals["env_actions"])
            assert self.locals["clipped_actions"].shape == (8, 2)
            return True

    make(env=TensorPassing(), backend="device").learn(256, callback=Reader())


def test_tensor_environments_check_actions():
    """Tensors of another form than the space's are refused by name."""
    env = TensorPassing(in_tuples=True)
    env.reset_tensors()
    mate, power = th.zeros(8, dtype=th.int64), th.zeros(8, 1)
    for actions, message in (
        ({"mate": mate, "power": power}, "give a tuple"),
        ((mate,), r"len\(actions\)"),
        ((mate, power[:, 0]), r"actions\[1\].shape"),
        ((power, power), r"actions\[0\].shape"),
    ):
        with pytest.raises(ValueError, match=message):
            env.step_tensors(actions)


# Zips


@pytest.mark.parametrize("name", SPACES)
def test_zips(name):
    """A model that was saved and loaded goes on as one that was not."""
    assert_continues({}, SPACES[name])


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpTransformerPolicy", "MlpLstmPolicy"])
def test_loaded(policy, trusted):
    """A zip has the action space, is refused with another one, and acts as before."""
    model = make(SPACES["nested"], policy, action_dist="beta").learn(16)
    loaded = Zip(model).load(device="cpu", trusted=trusted)
    assert loaded.action_space == SPACES["nested"]
    observations = np.zeros((3, 3), np.float32)
    flat = model.policy.action_space
    one, other = (flat.flattened(each.predict(observations, deterministic=True)[0]) for each in (model, loaded))
    np.testing.assert_array_equal(one, other)
    loaded.set_env(make_toys(action_space=SPACES["nested"], length=5))
    loaded.learn(16)
    with pytest.raises(ValueError, match="Action spaces do not match"):
        loaded.set_env(make_toys(action_space=KICK))


# Learning


@pytest.mark.slow
@pytest.mark.parametrize("action_dist", ["gaussian", "beta"])
def test_learning(action_dist):
    """A task that needs both kinds of actions is learned: of 10, chance gets 1.2, and the right mate alone 3.5."""
    env = make_vec_env(Passing, 8, seed=0)
    model = PPOExt(MlpPolicy, env, n_steps=64, batch_size=128, n_epochs=10, learning_rate=1e-3, seed=0, device="cpu",
                   action_dist=action_dist, gamma=0.5)  # fmt: skip
    model.learn(40_000)
    mean, _ = evaluate_policy(model, make_vec_env(Passing, 1, seed=1), 50)
    assert mean > 8.5
