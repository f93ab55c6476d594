"""Environments in JAX: one compiled step with resets, time limits, last observations and shared memory."""

import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecNormalize
from support.cases import one_in
from torch.nn.utils import parameters_to_vector

from sb3_ppo_ext import JaxVecEnv, PPOExt, TensorVecNormalize, TrainingCheckpoint
from sb3_ppo_ext.distributed.launch import find_launch, own_device
from sb3_ppo_ext.envs.tensors import jax_functions, jax_vec_env

pytestmark = [
    pytest.mark.integration,  # each environment is compiled
    pytest.mark.xdist_group("jax"),  # One process imports JAX, and compiles once what several tests share.
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype"),
    pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types"),
]
BOX, PUSH = spaces.Box(0, np.inf, (1,), np.float32), spaces.Box(-1, 1, (1,), np.float32)


def pole(num_envs=16, limit=12, **kwargs):
    return JaxVecEnv("CartPole-v1", {"max_steps_in_episode": limit}, num_envs=num_envs, **kwargs)


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """JAX and gymnax, which take seconds to import, where these tests run alone."""
    global jax, gymnax
    jax, gymnax = pytest.importorskip("jax"), pytest.importorskip("gymnax")
    jax.tree_util.register_pytree_node(
        BraxState, lambda s: ((s.obs, s.reward, s.done, s.metrics, s.info), None), lambda _, parts: BraxState(*parts)
    )


@pytest.fixture(scope="module")
def poles():
    """Short episodes of many poles, some of which fall before they are cut off."""
    env = pole()
    env.seed(0)
    return env


def test_steps_are_those_of_gymnax(poles):
    """Last observations, rewards and ends are those of gymnax's own step from the same states; then new episodes begin."""
    raw, params = gymnax.make("CartPole-v1")
    one_step = jax.jit(jax.vmap(lambda state, action: raw.step_env(jax.random.key(0), state, action, params)))
    poles.reset_tensors()
    kinds = set()
    for _ in range(40):
        before = poles._state[1]
        actions = th.randint(0, 2, (16,))
        step = poles.step_tensors(actions)
        last, _, rewards, fallen, _ = one_step(before, actions.numpy().astype(np.int32))
        fallen, time = np.asarray(fallen), np.asarray(before.time) + 1
        np.testing.assert_allclose(step.final_observations.numpy(), np.asarray(last), rtol=1e-6)
        np.testing.assert_array_equal(step.rewards.numpy(), np.asarray(rewards))
        np.testing.assert_array_equal(step.terminated.numpy(), fallen)
        np.testing.assert_array_equal(step.truncated.numpy(), (time >= 12) & ~fallen)
        ended = fallen | (time >= 12)
        np.testing.assert_array_equal(step.episode_lengths.numpy(), time)
        np.testing.assert_array_equal(step.observations[~ended].numpy(), step.final_observations[~ended].numpy())
        assert (step.observations[ended].abs() <= 0.05).all()
        assert len(set(step.observations[ended][:, 0].tolist())) == ended.sum()
        assert (np.asarray(poles._state[1].time)[ended] == 0).all()
        kinds |= {(bool(t), bool(c)) for t, c in zip(step.terminated, step.truncated, strict=True)}
    assert kinds == {(False, False), (True, False), (False, True)}


def test_dynamics_are_those_of_gymnasium(poles):
    """The poles move as those of Gymnasium."""
    env = gym.make("CartPole-v1").unwrapped
    env.reset()
    poles.reset()
    for _ in range(8):
        state = poles._state[1]
        env.state = np.array([part[3] for part in (state.x, state.x_dot, state.theta, state.theta_dot)], np.float64)
        poles.step(np.ones(16, np.int64))
        expected = env.step(1)[0]
        given = np.array([getattr(poles._state[1], name)[3] for name in ("x", "x_dot", "theta", "theta_dot")])
        if poles._state[1].time[3] > 0:
            np.testing.assert_allclose(given, expected, rtol=1e-4, atol=1e-6)


def test_seeds(poles):
    """The same seed gives the same episodes, other seeds others, and without a seed they go on."""

    def episodes(seed):
        if seed is not None:
            poles.seed(seed)
        poles.reset()
        return np.concatenate([poles.step(np.ones(16, np.int64))[0] for _ in range(15)])

    first = episodes(3)
    np.testing.assert_array_equal(first, episodes(3))
    assert not np.array_equal(first, episodes(4))
    assert not np.array_equal(episodes(None), episodes(None))


def test_infos(poles):
    """In NumPy, the infos have what SB3 reads at the end of an episode."""
    poles.seed(0)
    poles.reset()
    for _ in range(12):
        _, _, dones, infos = poles.step(np.random.randint(0, 2, 16))
    assert dones.any()
    for index in np.flatnonzero(dones):
        assert infos[index]["TimeLimit.truncated"] == bool(np.abs(infos[index]["terminal_observation"][2]) < 12 * np.pi / 180)
        assert infos[index]["episode"]["l"] <= 12


def test_results_share_memory(poles):
    """Observations, and actions by DLPack, are at the same address in PyTorch and JAX."""
    array = jax.numpy.ones((16, 4)) + 1
    assert poles._to_torch(array).data_ptr() == array.unsafe_buffer_pointer()
    tensor = th.ones(16, 4)
    assert jax.dlpack.from_dlpack(tensor).unsafe_buffer_pointer() == tensor.data_ptr()


@pytest.mark.parametrize(
    ("name", "limit"),
    [("Pendulum-v1", 3), ("Catch-bsuite", 3)],
)
def test_time_limits_of_gymnax(name, limit):
    """Episodes that reach the limit are truncated, also where the state keeps whether it is terminal."""
    env = JaxVecEnv(name, {"max_steps_in_episode": limit}, num_envs=2)
    env.seed(0)
    assert env.observation_space.contains(np.asarray(env.reset()[0], env.observation_space.dtype))
    for n in range(1, 7):
        _, _, dones, infos = env.step(np.array([env.action_space.sample() for _ in range(2)]))
        assert dones.tolist() == [n % 3 == 0] * 2
    assert [info["TimeLimit.truncated"] for info in infos] == [True, True]


def test_terminations_of_gymnax():
    """The ball of Catch is at the bottom after nine steps, which is no time-out."""
    env = JaxVecEnv("Catch-bsuite", num_envs=2)
    env.reset()
    for _ in range(9):
        _, _, dones, infos = env.step(np.zeros(2, np.int64))
    assert dones.all()
    assert [info["TimeLimit.truncated"] for info in infos] == [False, False]


def test_finite_horizons():
    """With `is_finite_horizon`, running out of time terminates."""
    env = pole(2, 3, is_finite_horizon=True)
    env.reset_tensors()
    for _ in range(3):
        step = env.step_tensors(th.ones(2, dtype=th.int64))
    assert step.terminated.all()
    assert not step.truncated.any()


def clock_reset(key):
    """First observation and state of a clock, which starts at a random time below one."""
    time = jax.random.uniform(key, (1,))
    return time, time


def clock_step(key, state, action):
    """The clock goes on by the action, and terminates from 4 on."""
    state = state + action
    return state, state, state[0] * 2, state[0] >= 4, False


def test_pair_of_functions():
    """A pair of functions is an environment, with its own limit of steps; a log comes into the infos."""

    def step_with_log(key, state, action):
        return *clock_step(key, state, action), {"time": state[0]}

    env = JaxVecEnv((clock_reset, step_with_log), None, 2, "cpu", BOX, PUSH, max_episode_steps=6)
    env.seed(0)
    start = env.reset_tensors()[:, 0].clone()
    actions = th.tensor([[1.0], [0.1]])
    for n in range(1, 7):
        step = env.step_tensors(actions)
        assert step.terminated.tolist() == [n == 4, False]
        assert step.truncated.tolist() == [False, n == 6]
        if n <= 4:
            th.testing.assert_close(step.final_observations[:, 0], start + n * actions[:, 0])
            th.testing.assert_close(step.rewards, 2 * step.final_observations[:, 0])
    assert step.log["time"].shape == (2,)
    assert 0 <= step.observations[1, 0] < 1


def test_observations_in_dictionaries():
    """Observations may be a dictionary."""

    def reset(key):
        return {"time": jax.numpy.zeros(1), "kind": jax.numpy.ones((), int)}, jax.numpy.zeros(1)

    def step(key, state, action):
        return {"time": state + 1, "kind": jax.numpy.ones((), int)}, state + 1, 1.0, state[0] >= 2, False

    space = spaces.Dict({"time": BOX, "kind": spaces.Discrete(3)})
    env = JaxVecEnv((reset, step), num_envs=2, observation_space=space, action_space=spaces.Discrete(2))
    assert env.reset()["kind"].dtype == np.int64
    for _ in range(3):
        observations, _, _, infos = env.step(np.ones(2))
    assert observations["time"].tolist() == [[0], [0]]
    assert infos[0]["terminal_observation"]["time"].tolist() == [3]


class BraxState:
    """What brax's states have, as a tree of JAX."""

    def __init__(self, obs, reward, done, metrics, info):
        self.obs, self.reward, self.done, self.metrics, self.info = obs, reward, done, metrics, info


class LikeBrax:
    """The functions of brax's environments, whose ends are floats. The clock ends at 3, or after its number of steps."""

    observation_size: Any = 1
    action_size = 1

    def __init__(self, episode_length=4):
        self.episode_length = episode_length

    def reset(self, rng):
        zero = jax.numpy.zeros(())
        info = {"steps": zero, "truncation": zero, "rng": rng}
        return BraxState(jax.random.uniform(rng, (1,)), zero, zero, {"distance": zero}, info)

    def step(self, state, action):
        obs = state.obs + action
        steps = state.info["steps"] + 1
        fallen = (obs[0] >= 3).astype(float)
        late = steps >= self.episode_length
        info = {**state.info, "steps": steps, "truncation": jax.numpy.where(late, 1 - fallen, 0.0)}
        done = jax.numpy.where(late, 1.0, fallen)
        return BraxState(obs, obs[0], done, {"distance": obs[0]}, info)


class AutoResetWrapper:
    """A wrapper of brax by its name."""

    def __init__(self, env):
        self.env = env

    def __getattr__(self, name):
        return getattr(vars(self)["env"], name)


def test_brax():
    """Environments of brax end as `done` and `truncation` say; their metrics are the log."""
    env = JaxVecEnv(LikeBrax(), num_envs=2)
    assert (env.observation_space.shape, env.action_space.shape) == ((1,), (1,))
    env.seed(0)
    start = env.reset_tensors()[:, 0].clone()
    actions = th.tensor([[1.0], [0.1]])
    for n in range(1, 5):
        step = env.step_tensors(actions)
        assert step.terminated.tolist() == [n == 3, False]
        assert step.truncated.tolist() == [False, n == 4]
    th.testing.assert_close(step.final_observations[1, 0], start[1] + 0.4)
    th.testing.assert_close(step.log["distance"], step.rewards)
    assert env.get_attr("episode_length") == [4, 4]


BAD = {
    "env=": [lambda: JaxVecEnv("CartPole-v9"), lambda: JaxVecEnv(4), lambda: JaxVecEnv(AutoResetWrapper(LikeBrax()))],
    "num_envs": [lambda: JaxVecEnv("CartPole-v1", num_envs=0)],
    "env_params": [lambda: JaxVecEnv("CartPole-v1", {"limit": 3}), lambda: JaxVecEnv(LikeBrax(), {"limit": 3})],
    "max_episode_steps": [lambda: JaxVecEnv("CartPole-v1", max_episode_steps=0)],
    "observation_space": [lambda: JaxVecEnv((clock_reset, clock_step))],
    "action_space": [lambda: JaxVecEnv((clock_reset, clock_step), observation_space=BOX)],
    "device": [lambda: JaxVecEnv("CartPole-v1", device="cuda:99"), lambda: JaxVecEnv("CartPole-v1", device="gpu?")],
    "observations.shape": [lambda: JaxVecEnv((clock_reset, clock_step), None, 2, "cpu", spaces.Box(0, 1, (2,)), PUSH).reset()],
}


@pytest.mark.parametrize(("name", "make"), [(name, make) for name, makers in BAD.items() for make in makers])
def test_bad_arguments(name, make):
    """Each bad argument is a ValueError that names it."""
    with pytest.raises(ValueError, match=name):
        make()


def dict_state_reset(key):
    return jax.numpy.zeros(1), {"time": jax.numpy.zeros(1)}


def dict_state_step(key, state, action):
    return state["time"], state, 0.0, False, False


WRONG = {
    "no truncated": (clock_reset, lambda *args: clock_step(*args)[:4], "`step` returns 4 values"),
    "no tuple": (clock_reset, lambda *args: clock_step(*args)[0], r"`step` returns an array of shape \(1,\)"),
    "reset of one": (
        lambda key: clock_reset(key)[0],
        clock_step,
        r"`reset` returns an array of shape \(1,\); return obs, state",
    ),
    "reset of three": (lambda key: (*clock_reset(key), {}), clock_step, "`reset` returns 3 values"),
    "swapped reset": (
        lambda key: dict_state_reset(key)[::-1],
        dict_state_step,
        r"`reset` returns a dict with the keys \['time'\]",
    ),
    "swapped step": (
        dict_state_reset,
        lambda *args: (dict_state_step(*args)[1], dict_state_step(*args)[0], 0.0, False, False),
        "`step` returns a dict as obs and an array .* as state, and `reset` an array .* and a dict",
    ),
    "order of gymnax": (clock_reset, lambda *args: (*clock_step(*args)[:4], {}), "`step` returns a dict as `truncated`"),
    "state at the end": (
        dict_state_reset,
        lambda key, state, action: (jax.numpy.zeros(1), 0.0, False, False, state),
        "`step` returns a dict as `truncated`",
    ),
    "vector of rewards": (
        clock_reset,
        lambda *args: (*clock_step(*args)[:2], jax.numpy.ones(2), False, False),
        r"`step` returns an array of shape \(2,\) as `reward`.*weight",
    ),
    "reward of one": (clock_reset, lambda *args: (*clock_step(*args)[:2], jax.numpy.ones(1), False, False), "as `reward`"),
    "no reward": (clock_reset, lambda *args: (*clock_step(*args)[:2], None, False, False), "a NoneType as `reward`"),
}


@pytest.mark.parametrize("name", one_in(2, WRONG))
def test_wrong_results(name):
    """The message says which function returned what, in place of what."""
    reset, step, message = WRONG[name]
    env = JaxVecEnv((reset, step), None, 2, "cpu", BOX, PUSH)
    with pytest.raises(ValueError, match=message):
        env.reset(), env.step(np.ones((2, 1), np.float32))


@pytest.mark.parametrize("is_dict", one_in(2, [True, False]))
def test_decimals_are_not_cut_off(is_dict):
    """Observations of floats under a space of integers are refused by name, before they are cut off."""

    def of(observation):
        return {"camera": observation} if is_dict else observation

    def step(key, state, action):
        return of(state + 0.5), state, 0.0, False, False

    image = spaces.Box(0, 255, (1,), np.uint8)
    space = spaces.Dict({"camera": image}) if is_dict else image
    floats, integers = (lambda key, d=d: (of(jax.numpy.zeros(1, d)), jax.numpy.zeros(1)) for d in (float, np.uint8))
    with pytest.raises(ValueError, match=r"observations.*dtype=torch.float32.*decimals"):
        JaxVecEnv((floats, step), None, 2, "cpu", space, PUSH).reset()
    env = JaxVecEnv((integers, lambda *args: (of(clock_step(*args)[0]), *clock_step(*args)[1:])), None, 2, "cpu", space, PUSH)
    env.reset()
    with pytest.raises(ValueError, match=r"observations.*dtype=torch.float32.*decimals"):
        env.step(np.ones((2, 1), np.float32))


class Discrete:
    """A space of craftax, whose classes are its own copies of gymnax's."""

    def __init__(self, n):
        self.n = n


class Box:
    """As :class:`Discrete`"""

    def __init__(self, low, high, shape):
        self.low, self.high, self.shape = low, high, shape


class CraftaxParams:
    """Its limit of steps has a name of its own."""

    def __init__(self, max_timesteps=4):
        self.max_timesteps = max_timesteps

    def replace(self, max_timesteps):
        return CraftaxParams(max_timesteps)


class LikeCraftax:
    """In the style of gymnax, without being of it. The clock ends at 3, or after its number of steps."""

    default_params = CraftaxParams()

    def observation_space(self, params):
        return Box(0.0, np.inf, (1,))

    def action_space(self, params):
        return Discrete(2)

    def reset_env(self, key, params):
        return jax.numpy.zeros(1), (0, 0)

    def step_env(self, key, state, action, params):
        time, place = state[0] + 1, state[1] + action
        done = (place >= 3) | (time >= params.max_timesteps)
        return jax.numpy.full(1, place, float), (time, place), 1.0, done, {}


@pytest.mark.parametrize(("params", "limit"), [(None, 4), ({"max_timesteps": 5}, 5)])
def test_craftax(params, limit):
    """Spaces of own classes are read by their names, and its limit of steps cuts episodes off."""
    env = JaxVecEnv(LikeCraftax(), params, num_envs=2)
    assert env.action_space == spaces.Discrete(2)
    assert env.observation_space == spaces.Box(0, np.inf, (1,), np.float32)
    env.reset()
    for n in range(1, limit + 1):
        step = env.step_tensors(th.tensor([1, 0]))
        assert step.terminated.tolist() == [n == 3, False]
        assert step.truncated.tolist() == [False, n == limit]


class LikePlayground(LikeBrax):
    """
    As an environment of MuJoCo Playground with its default engine: what all copies have in common has a size of its own, and
    the limit of steps is in its configuration alone.
    """

    _config = SimpleNamespace(episode_length=4)

    def reset(self, rng):
        state = super().reset(rng)
        state.info["contacts"] = jax.numpy.zeros(7)
        return state

    def step(self, state, action):
        contacts = state.info["contacts"]
        obs = state.obs + action
        done = (obs[0] >= 3).astype(float)
        return BraxState(obs, obs[0], done, {"distance": obs[0]}, {**state.info, "contacts": contacts + 1})


class EpisodeWrapper(AutoResetWrapper):
    """A wrapper of brax by its name, which limits the steps itself."""


def in_common(batched, shares):
    """What `jax.vmap` gives, but what copies have in common stays that of one of them, as with the batching of MuJoCo Warp."""

    def call(*args):
        parts = list(args)
        for index, part in enumerate(args):
            if isinstance(part, BraxState):
                n = len(part.done)
                info = {**part.info, "contacts": jax.numpy.broadcast_to(part.info["contacts"], (n, 7))}
                parts[index] = BraxState(part.obs, part.reward, part.done, part.metrics, info)
        results = batched(*parts)
        state = results[1]
        state.info["contacts"] = state.info["contacts"][0]
        shares.append(state.info["contacts"].shape)
        return results

    return call


def test_playground(monkeypatch):
    """What copies have in common stays that of the step where an episode begins; the limit is that of the configuration."""
    shares, vmap = [], jax.vmap
    monkeypatch.setattr(
        jax, "vmap", lambda f: in_common(vmap(f), shares) if f.__module__.endswith("jax_functions") else vmap(f)
    )
    env = JaxVecEnv(LikePlayground(), num_envs=2)
    monkeypatch.undo()
    env.seed(0)
    env.reset_tensors()
    for n in range(1, 9):
        step = env.step_tensors(th.tensor([[1.0], [0.1]]))
        assert step.terminated.tolist() == [n % 3 == 0, False]
        assert step.truncated.tolist() == [False, n % 4 == 0]
    assert env._state[1].info["contacts"].tolist() == [8.0] * 7
    assert set(shares) == {(7,)}


def test_limits_of_playground():
    """An argument goes before the configuration, and so does brax's wrapper."""
    for env, kwargs, ends in (
        (LikePlayground(), dict(max_episode_steps=2), [2, 4]),
        (EpisodeWrapper(LikePlayground()), {}, []),
    ):
        copies = JaxVecEnv(env, num_envs=1, **kwargs)
        copies.reset_tensors()
        steps = [copies.step_tensors(th.full((1, 1), 0.1)).truncated.item() for _ in range(5)]
        assert [n for n, cut_off in enumerate(steps, 1) if cut_off] == ends


class BraxAutoResetWrapper(AutoResetWrapper):
    """The wrapper of MuJoCo Playground by its name."""


def test_wrapped_playground():
    """The message for `wrap_for_brax_training` names what there is in MuJoCo Playground."""
    with pytest.raises(ValueError, match=r"BraxAutoResetWrapper.*without `wrap_for_brax_training`.*max_episode_steps"):
        JaxVecEnv(BraxAutoResetWrapper(LikePlayground()))


@pytest.mark.parametrize("missing", ["jax", "gymnax"])
def test_without_jax(missing, monkeypatch):
    """The error says how to install what is missing."""
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r"pip install 'sb3-ppo-ext\[jax\]'"):
        JaxVecEnv("CartPole-v1")


def test_training():
    """PPOExt learns on it, and episodes are counted."""
    model = PPOExt("MlpPolicy", pole(8), n_steps=32, batch_size=64, n_epochs=1, device="cpu").learn(512)
    assert len(model.ep_info_buffer) > 10


@pytest.mark.parametrize("in_tuples", one_in(2, [False, True]), ids=["dict", "tuple"])
def test_hybrid_actions(in_tuples):
    """A function of one copy gets a dictionary or tuple of its actions, as `predict` returns it and as it is trained."""
    parts = {"kind": spaces.Discrete(3), "push": PUSH}

    def reset(key):
        return jax.numpy.zeros(1), jax.numpy.zeros(1)

    def step(key, state, action):
        kind, push = action if in_tuples else (action["kind"], action["push"])
        state = state + kind + push
        return state, state, 10.0 * kind + push[0], False, False

    action_space = spaces.Tuple(tuple(parts.values())) if in_tuples else spaces.Dict(parts)
    copies = dict(num_envs=4, observation_space=BOX, action_space=action_space)
    env = JaxVecEnv((reset, step), **copies, max_episode_steps=5)
    model = PPOExt("MlpPolicy", env, n_steps=8, batch_size=16, device="cpu", seed=0).learn(64)
    actions, _ = model.predict(env.reset())
    _, rewards, _, _ = env.step(actions)
    expected = [10 * a[0] + a[1][0] if in_tuples else 10 * a["kind"] + a["push"][0] for a in actions]
    np.testing.assert_allclose(rewards, expected, rtol=1e-5)


@pytest.mark.parametrize(("device", "number"), [("auto", 1), ("cuda", 1), ("cuda:0", 0)])
def test_ranks_have_gpus_of_their_own(device, number, monkeypatch):
    """In a distributed training, environments step on the GPU of the rank, as the model does; two GPUs are simulated."""
    variables = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "TORCHELASTIC_RUN_ID": "run"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(th.cuda, "is_available", lambda: True)
    monkeypatch.setattr(th.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(jax_vec_env, "check_device", lambda device: None)
    chosen: list[int] = []
    monkeypatch.setattr(th.cuda, "set_device", chosen.append)
    # On the second of two machines that `jax.distributed` has joined, whose GPUs it counts as well
    gpus = [SimpleNamespace(platform="gpu", id=2 + index, local_hardware_id=index) for index in range(2)]
    simulated = SimpleNamespace(default_backend=lambda: "gpu", local_devices=lambda backend=None: gpus)
    made = jax_vec_env._torch_device(jax_vec_env._jax_device(simulated, device))
    assert made == th.device("cuda", number)
    if device != "cuda:0":
        assert made == own_device("cuda", find_launch("auto"))
        assert chosen == [number]


def test_actions_that_are_not_used_are_read():
    """The compiled step takes actions that no environment uses: by them, JAX waits until PyTorch has read the last results."""

    def ignoring(key, state, action):
        return state, state, 0.0, False, False

    functions = jax_functions.functions_of((lambda key: (jax.numpy.zeros(1), jax.numpy.zeros(1)), ignoring))
    reset, step = jax_functions.compiled(functions, 2, 10, False, True)
    _, state = reset(jax.random.key(0))
    actions = jax.numpy.zeros((2, 7))
    assert "tensor<2x7xf32>" in step.lower(state, actions).as_text()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, True),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, False),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}, False),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, False),
    ],
)
def test_memory_of_a_gpu(environment, expected):
    """It is said that JAX takes most of a GPU, unless the user has decided how much it takes."""
    assert jax_vec_env.takes_most_memory(environment) == expected


def test_resets_where_an_episode_ends():
    """On a CPU, nothing is reset in a step in which no episode ends, and copies that go on keep their state."""
    n_resets = []

    def reset(key):
        jax.debug.callback(lambda: n_resets.append(1))
        return jax.numpy.zeros(1), jax.numpy.zeros(())

    def step(key, state, action):
        after = state + action[0]
        return after[None], after, 1.0, after >= 3, False

    env = JaxVecEnv((reset, step), num_envs=2, observation_space=BOX, action_space=PUSH, device="cpu")
    env.reset_tensors()
    jax.effects_barrier()
    at_start = len(n_resets)
    seen = []
    for _ in range(3):
        found = env.step_tensors(th.tensor([[1.0], [0.5]]))
        jax.effects_barrier()
        seen.append((found.observations.flatten().tolist(), len(n_resets) - at_start))
    assert seen == [([1.0, 0.5], 0), ([2.0, 1.0], 0), ([0.0, 1.5], 1)]


@pytest.mark.parametrize("wrap", [lambda env: env, TensorVecNormalize, VecNormalize], ids=["plain", "tensors", "SB3's"])
@pytest.mark.parametrize("backend", ["native", "device"])
@pytest.mark.filterwarnings("error:.*reset of the environments")
def test_training_is_resumed_in_the_middle_of_episodes(wrap, backend, tmp_path):
    """An interrupted training goes on with the environments as they were, and ends as one that was not interrupted."""

    def make_env():
        env = pole(num_envs=4)
        env.seed(3)
        return wrap(env)

    options = dict(n_steps=16, batch_size=32, n_epochs=1, seed=0, device="cpu", backend=backend)
    whole = PPOExt("MlpPolicy", make_env(), **options).learn(384)
    PPOExt("MlpPolicy", make_env(), **options).learn(192, TrainingCheckpoint(16, tmp_path))
    resumed = PPOExt.resume(tmp_path, make_env()).learn(384)
    assert resumed.num_timesteps == 384
    expected, found = (parameters_to_vector(model.policy.parameters()) for model in (whole, resumed))
    assert th.equal(found, expected)


def test_state_that_cannot_be_pickled(tmp_path):
    """It is said that such environments begin new episodes."""

    class Local(NamedTuple):
        x: Any

    def reset(key):
        return jax.numpy.zeros(1), Local(jax.numpy.zeros(()))

    def step(key, state, action):
        return state.x[None], Local(state.x + action[0]), 1.0, state.x >= 3, False

    env = JaxVecEnv((reset, step), num_envs=2, observation_space=BOX, action_space=PUSH, device="cpu")
    with pytest.warns(UserWarning, match=r"will start with a reset.*`JaxVecEnv._state` cannot be pickled"):
        PPOExt("MlpPolicy", env, n_steps=16, batch_size=32, seed=0).learn(32, TrainingCheckpoint(16, tmp_path))
