"""What an environment is given is its own, and what it gives is copied where it is kept."""

import itertools
import warnings
from functools import partial

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    SubprocVecEnv,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
)
from support.cases import one_in
from support.hybrid import KICK
from support.parity import assert_equal
from support.reusing import Reusing, ReusingEnv, ReusingTorchEnv, ReusingVectorEnv
from support.toys import BOX_ACTION, DICT, IMAGE, VECTOR, warned

from sb3_ppo_ext import (
    CheckedSubprocVecEnv,
    FastDummyVecEnv,
    ParallelVecEnv,
    PPOExt,
    RNDReward,
    TorchVecEnv,
    VectorEnvAdapter,
)
from sb3_ppo_ext.engines.native import extension
from sb3_ppo_ext.rollout.own_copies import gives_new_arrays

ARRAYS = ("observations", "actions", "rewards", "episode_starts", "values", "log_probs", "advantages", "returns")
ACTIONS = {
    "box": BOX_ACTION,
    "discrete": spaces.Discrete(4),
    "multi-discrete": spaces.MultiDiscrete([3, 2]),
    "multi-binary": spaces.MultiBinary(3),
    "hybrid": KICK,
}
SMALL = dict(n_steps=6, batch_size=9, n_epochs=1, seed=0, device="cpu")
# Every kind of what is stored and remembered: each engine with an MLP, each memory on each engine that takes it
MEMORY = dict(lstm_hidden_size=8, net_arch=[8])
WINDOW = dict(context_length=4, d_model=8, n_heads=1, n_layers=1)
POLICIES = {
    "eager": dict(backend="eager"),
    "fused": dict(backend="fused"),
    "native": dict(backend="native"),
    "device": dict(backend="device"),
    "eager, LSTM": dict(policy="MlpLstmPolicy", backend="eager", policy_kwargs=MEMORY),
    "fused, GRU": dict(policy="MlpLstmPolicy", backend="fused", policy_kwargs=dict(**MEMORY, rnn="gru")),
    "eager, transformer": dict(policy="MlpTransformerPolicy", backend="eager", policy_kwargs=WINDOW),
    "fused, transformer": dict(policy="MlpTransformerPolicy", backend="fused", policy_kwargs=WINDOW),
    "device, transformer": dict(policy="MlpTransformerPolicy", backend="device", policy_kwargs=WINDOW),
}
if extension.module is None:
    del POLICIES["native"]


def pairs(first, actions=tuple(ACTIONS)):
    """Every policy with every kind of actions; the default suite takes every second policy with one kind, in turn."""
    cases = [(number, policy, k, name) for number, policy in enumerate(POLICIES) for k, name in enumerate(actions)]
    chosen = {True: (), False: pytest.mark.slow}
    return [
        pytest.param(policy, name, marks=chosen[k == (first + number) % len(actions) and (first + number) % 2 == 0])
        for number, policy, k, name in cases
    ]


def trained(env, policy="MlpPolicy", **options):
    """Everything that a rollout and an update have left, after two rollouts and the updates that follow."""
    model = PPOExt(policy, env, **{**SMALL, **options})
    rollouts = []
    for _ in range(2):
        model.learn(SMALL["n_steps"] * model.n_envs, reset_num_timesteps=False)
        rollouts.append({name: _copied(getattr(model.rollout_buffer, name)) for name in ARRAYS})
    episodes = [(info["r"], info["l"]) for info in model.ep_info_buffer]
    assert episodes
    return [rollouts, episodes, _copied(model._last_obs), np.copy(model._last_episode_starts), model.policy.state_dict()]


def _copied(value):
    return {key: np.copy(part) for key, part in value.items()} if isinstance(value, dict) else np.copy(value)


def assert_same_training(make_env, **options):
    """An environment that reuses its memory trains as one that does not, to the bit."""
    expected, actual = (trained(make_env(reuses), **options) for reuses in (False, True))
    assert_equal(expected, actual, "")


@pytest.mark.parametrize(("policy", "actions"), pairs(0))
def test_vec_envs(policy, actions):
    """Actions, observations, rewards, dones, infos and terminal observations of a ``VecEnv`` in one memory."""
    assert_same_training(lambda reuses: Reusing(reuses, VECTOR, ACTIONS[actions]), **POLICIES[policy])


@pytest.mark.parametrize("backend", one_in(3, ["eager", "fused", "device"]))
@pytest.mark.parametrize(
    ("policy", "space", "keywords"),
    [
        ("MultiInputPolicy", DICT, {}),
        ("MultiInputLstmPolicy", spaces.Dict(a=VECTOR, b=spaces.Discrete(3)), MEMORY),
        ("MultiInputTransformerPolicy", spaces.Dict(a=VECTOR, b=spaces.Discrete(3)), WINDOW),
        ("CnnPolicy", IMAGE, {}),
        ("MlpPolicy", spaces.Discrete(5), {}),
        ("MlpPolicy", spaces.Box(-1.0, 1.0, (2, 2), np.float64), {}),
    ],
)
def test_observations(policy, space, keywords, backend):
    """Observations of all kinds; images are transposed by a wrapper, which returns a view of them."""
    assert_same_training(lambda reuses: Reusing(reuses, space), policy=policy, policy_kwargs=keywords, backend=backend)


@pytest.mark.parametrize("backend", [name for name in POLICIES if "," not in name])
def test_masks(backend):
    """Masks from a method of environments with one array for them."""
    make_env = lambda reuses: Reusing(reuses, VECTOR, ACTIONS["discrete"])  # noqa: E731
    assert_same_training(make_env, backend=backend, action_masking=True)


WRAPPERS = {
    "normalised": VecNormalize,
    "rewards as they are": lambda env: VecNormalize(env, norm_reward=False),
    "observations as they are": lambda env: VecNormalize(env, norm_obs=False),
    "stacked": lambda env: VecFrameStack(env, 2),
    "monitored": VecMonitor,
    "curious": lambda env: RNDReward(env, n_steps=12, net_arch=[8], n_features=4),
}


@pytest.mark.parametrize("backend", one_in(2, ["eager", "fused"]))
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers(wrapper, backend):
    """With wrappers in between, which may pass on what the environment has returned."""
    assert_same_training(lambda reuses: WRAPPERS[wrapper](Reusing(reuses)), backend=backend)


def test_rewards_of_the_environment():
    """The values of truncated episodes are added to copies of the rewards: those that a wrapper keeps stay as they are."""
    env = VecNormalize(Reusing(False), norm_reward=False)
    model = PPOExt("MlpPolicy", env, backend="eager", gamma=0.9, **{**SMALL, "n_steps": 5, "batch_size": 15}).learn(15)
    rewards = model.rollout_buffer.rewards[4]
    assert rewards[1] != env.get_original_reward()[1]
    np.testing.assert_array_equal(rewards[[0, 2]], env.get_original_reward()[[0, 2]])


@pytest.mark.parametrize(("policy", "actions"), pairs(1))
def test_torch_vec_env(policy, actions):
    """Tensors in one memory, and actions that are overwritten."""
    assert_same_training(lambda reuses: TorchVecEnv(ReusingTorchEnv(reuses, ACTIONS[actions])), **POLICIES[policy])


@pytest.mark.parametrize("policy", one_in(3, POLICIES))
def test_graphs(policy):
    """Tensors with a graph of autograd are detached, with one warning that says how the graph stays small."""
    options = dict(learning_rate=1e-3, **POLICIES[policy])
    expected = trained(TorchVecEnv(ReusingTorchEnv(False)), **options)
    with pytest.warns(UserWarning, match="graph of autograd, which are detached") as record:
        actual = trained(TorchVecEnv(ReusingTorchEnv(False, has_graph=True)), **options)
    assert sum("autograd" in str(warning.message) for warning in record) == 1
    assert_equal(expected, actual, "")


@pytest.mark.parametrize(("policy", "actions"), pairs(3, ("box", "discrete", "multi-discrete", "multi-binary")))
def test_gymnasium_vector_envs(policy, actions):
    """Gymnasium's vectorised environments, through the adapter."""

    def make_env(reuses):
        return VecMonitor(VectorEnvAdapter(ReusingVectorEnv(reuses, ACTIONS[actions])))

    assert_same_training(make_env, **POLICIES[policy])


def make_env_class(vec_env_class, actions="box", **kwargs):
    def make(reuses):
        env = vec_env_class([lambda: ReusingEnv(reuses, VECTOR, ACTIONS[actions])] * 3, **kwargs)
        return VecMonitor(env)

    return make


@pytest.mark.parametrize(("policy", "actions"), pairs(2))
def test_single_environments(policy, actions):
    """Environments that reuse their memory, in this process."""
    assert_same_training(make_env_class(FastDummyVecEnv, actions), **POLICIES[policy])


@pytest.mark.integration
@pytest.mark.parametrize("vec_env_class", [CheckedSubprocVecEnv, ParallelVecEnv])
@pytest.mark.parametrize("actions", ["multi-discrete", "hybrid"])
def test_processes(vec_env_class, actions):
    """Environments that reuse their memory, in other processes."""
    assert_same_training(make_env_class(vec_env_class, actions, start_method="fork"), backend="fused")


@pytest.mark.parametrize("vec_env_class", [DummyVecEnv, FastDummyVecEnv])
def test_terminal_observations_in_one_array(vec_env_class):
    """SB3's class returns the first observation of the next episode in the place of the last one, which is said once."""
    env = make_vec_env(lambda: ReusingEnv(True), 3, vec_env_cls=vec_env_class)
    messages = warned(lambda: PPOExt("MlpPolicy", env, **SMALL).learn(150))
    found = [message for message in messages if "terminal observations" in message]
    assert len(found) == (vec_env_class is DummyVecEnv)
    assert all("vec_env_cls=FastDummyVecEnv" in message for message in found)


@pytest.mark.integration
def test_terminal_observations_in_one_array_of_a_process():
    """The same with ``SubprocVecEnv``."""
    env = make_vec_env(lambda: ReusingEnv(True), 3, vec_env_cls=SubprocVecEnv, vec_env_kwargs=dict(start_method="fork"))
    with pytest.warns(UserWarning, match="terminal observations"):
        PPOExt("MlpPolicy", env, **SMALL).learn(36)
    env.close()


@pytest.mark.parametrize("observation_space", [spaces.Discrete(1), spaces.Box(1.0, 1.0, (2,), np.float32), VECTOR])
def test_no_false_alarm(observation_space):
    """Nothing is said where observations never change, or are numbers, or are not overwritten."""
    env = make_vec_env(lambda: ReusingEnv(False, observation_space), 3)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*terminal observations.*")
        PPOExt("MlpPolicy", env, **SMALL).learn(72)


class Subclassed(FastDummyVecEnv):
    """May return anything."""


@pytest.mark.parametrize(
    ("make_env", "expected"),
    [
        (lambda: DummyVecEnv([lambda: ReusingEnv(True)]), True),
        (lambda: FastDummyVecEnv([lambda: ReusingEnv(True)]), True),
        (lambda: VecNormalize(VecMonitor(FastDummyVecEnv([lambda: ReusingEnv(True)]))), True),
        (lambda: VecTransposeImage(DummyVecEnv([lambda: ReusingEnv(True, IMAGE)])), True),
        (lambda: VecFrameStack(DummyVecEnv([lambda: ReusingEnv(True)]), 2), True),
        (lambda: VectorEnvAdapter(ReusingVectorEnv(True)), True),
        (lambda: Subclassed([lambda: ReusingEnv(True)]), False),
        (lambda: Reusing(True), False),
        (lambda: VecNormalize(Reusing(True), norm_obs=False), False),
    ],
)
def test_known_environments(make_env, expected):
    """Environments that are not copied from return arrays that share no memory with those of earlier steps."""
    env = make_env()
    assert gives_new_arrays(env) == expected
    if expected:
        env.reset()
        actions = np.stack([env.action_space.sample() for _ in range(env.num_envs)])
        first, second = env.step(actions), env.step(actions)
        assert not any(np.shares_memory(one, other) for one, other in zip(first[:3], second[:3], strict=True))
    env.step = partial(env.step)
    assert not gives_new_arrays(env)


def test_actions_for_the_environment_are_its_own():
    """An environment may keep its actions: later ones are other arrays, which no one else writes into."""
    given = []

    class Keeping(Reusing):
        def step_async(self, actions):
            super().step_async(actions)
            given.append(actions)

    model = PPOExt("MlpPolicy", Keeping(False, VECTOR, ACTIONS["multi-discrete"]), **SMALL).learn(18)
    stored = model.rollout_buffer.actions.reshape(3, 6, 2).swapaxes(0, 1)
    np.testing.assert_array_equal(np.stack(given), stored)
    assert not any(np.shares_memory(one, other) for one, other in itertools.pairwise(given))


def test_bandit():
    """A bandit that clamps its action after paying is learned as one that does not."""

    class Bandit(ReusingTorchEnv):
        def step(self, actions):
            rewards = (actions == 2).float()
            actions.clamp_(max=1)
            return th.zeros(3, 3), rewards, th.ones(3, dtype=th.bool), th.zeros(3, dtype=th.bool), {}

    env = TorchVecEnv(Bandit(False, spaces.Discrete(3)), final_observations=False)
    model = PPOExt("MlpPolicy", env, **{**SMALL, "n_steps": 64, "batch_size": 96, "n_epochs": 5}, learning_rate=0.01)
    model.learn(3000)
    probabilities = model.policy.get_distribution(th.zeros(1, 3)).distribution.probs
    assert probabilities[0, 2] > 0.9
