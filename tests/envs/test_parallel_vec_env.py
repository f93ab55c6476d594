"""Environments in few processes with many each say what DummyVecEnv says, whatever happens."""

import gc
import os
import sys
import threading

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
)
from support.cases import one_in
from support.parity import assert_equal
from support.toys import DICT, IMAGE, VECTOR, ToyEnv
from support.vec_envs import FORK, Asked, Plain, Slow, Talkative, add_to_attribute, nothing_is_left, rollout, without_clock

from sb3_ppo_ext import FastDummyVecEnv, ParallelVecEnv, PPOExt, TrainingCheckpoint
from sb3_ppo_ext.checkpoints.object_state import ObjectState, stateful_objects
from sb3_ppo_ext.common import cores
from sb3_ppo_ext.envs import choice_of_vec_env
from sb3_ppo_ext.envs.parallel import flags, shared_arrays, vec_env

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform == "win32", reason="workers are forked, which is faster"),
]
SPACES = {
    "vector": VECTOR,
    "image": IMAGE,
    "dict": DICT,
    "float64": spaces.Box(-1.0, 1.0, (2, 2), np.float64),
    "discrete": spaces.Discrete(4),
    "multi-discrete": spaces.MultiDiscrete([2, 3]),
    "multi-binary": spaces.MultiBinary(3),
    "tuple": spaces.Tuple((VECTOR, spaces.Discrete(2))),
}


class OfTuples(Plain):
    def step(self, action):
        self.observation, whole = self.observation[0], self.observation
        try:
            return super().step(action)
        finally:
            self.observation = whole


def env_fns(space=VECTOR, n_envs=5, cls=Plain, **kwargs):
    cls = OfTuples if isinstance(space, spaces.Tuple) else cls
    return [lambda: Monitor(cls(observation_space=space, **kwargs))] * n_envs


_nothing_is_left = pytest.fixture(autouse=True)(nothing_is_left)


def same_as_dummy(fns, n_steps=40, **kwargs):
    env = ParallelVecEnv(fns, **kwargs)
    try:
        seen = rollout(env, n_steps), env.metadata, env.render_mode
    finally:
        env.close()
    dummy = DummyVecEnv(fns)
    expected = rollout(dummy, n_steps), dummy.metadata, dummy.render_mode
    assert_equal(without_clock(list(expected)), without_clock(list(seen)))


@pytest.mark.parametrize("space", one_in(2, SPACES.values()), ids=SPACES)
def test_spaces(space):
    """Observations, rewards, ends, infos and reset infos are those of DummyVecEnv, and no later step changes them."""
    same_as_dummy(env_fns(space), n_workers=2, **FORK)


@pytest.mark.parametrize(
    "space",
    [spaces.Discrete(3), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(2), spaces.Box(-1, 1, (2,), np.float64)],
    ids=lambda space: type(space).__name__,
)
def test_action_spaces(space):
    """Environments get the actions that DummyVecEnv passes on, types included."""
    same_as_dummy([lambda: Recorder(action_space=space)] * 3, n_steps=10, n_workers=1, **FORK)


class Recorder(Plain):
    """Its infos tell the action."""

    def step(self, action):
        observation, *rest, _ = super().step(action)
        return observation, *rest, {"action": action, "type": str(type(action)), "dtype": str(np.asarray(action).dtype)}


@pytest.mark.parametrize("kind", [list, np.float64, np.float16])
def test_actions_of_other_types(kind):
    """Lists, and arrays of another type than that of the action space, reach the environments as they are."""
    seen = []
    for env in (DummyVecEnv([Loose] * 3), ParallelVecEnv([Loose] * 3, n_workers=2, **FORK)):
        env.reset()
        actions = np.zeros((3, 2)) + 0.5
        infos = env.step([list(row) for row in actions] if kind is list else actions.astype(kind))[3]
        seen.append([(info["type"], info["dtype"]) for info in infos])
        env.close()
    assert seen[0] == seen[1]


class Loose(Recorder):
    action_space = property(lambda self: Anything(), lambda self, value: None)


class Anything(spaces.Box):
    def __init__(self):
        super().__init__(-1, 1, (2,), np.float32)

    def contains(self, x):
        return True


@pytest.mark.parametrize("n_workers", one_in(3, [0, 1, 2, 3, 4, 9], 9))
def test_number_of_workers(n_workers):
    """The results do not depend on the number of workers, of which there are no more than needed."""
    same_as_dummy(env_fns(), n_workers=n_workers, **FORK)
    env = ParallelVecEnv(env_fns(), n_workers=n_workers, **FORK)
    assert env.n_workers == len(env.processes) == min(n_workers, 4)
    env.close()


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_start_methods(method):
    """All start methods have the same results."""
    same_as_dummy(env_fns(DICT, 3), n_workers=1, start_method=method, timeout=300)


@pytest.mark.parametrize("n_workers", [0, 2])
def test_without_the_extension_module(n_workers, monkeypatch):
    """Without it, pipes take the place of flags, with the same results."""
    monkeypatch.setattr(flags, "module", None)
    same_as_dummy(env_fns(), n_workers=n_workers, **FORK)
    env = ParallelVecEnv(env_fns(), n_workers=n_workers, **FORK)
    assert isinstance(env._pool.inbox, flags.NoFlags)
    env.close()


def test_infos_that_do_not_fit(monkeypatch):
    """Infos that are too large for the shared memory arrive as well."""
    monkeypatch.setattr(shared_arrays, "MAIL_SIZE", 200)
    same_as_dummy(env_fns(IMAGE), n_workers=2, **FORK)


def test_slow_answers():
    """Processes that fall asleep, since the others take longer than they spin, wake up."""
    same_as_dummy([Slow] * 3, n_steps=10, n_workers=2, **FORK)


def test_what_a_step_returns_stays():
    """Environments that write their observations and infos in place change nothing that was returned, in any process."""
    seen = [rollout(ParallelVecEnv(env_fns(cls=cls, n_envs=4), n_workers=1, **FORK)) for cls in (Talkative, Plain)]
    assert_equal(*map(without_clock, seen))


class InPlace(ToyEnv):
    """Writes into its action, and keeps it."""

    def step(self, action):
        result = super().step(action)
        kept = getattr(self, "kept", None)
        assert kept is None or (kept == -1).all()
        self.kept = action
        action[:] = -1
        return result


def test_environments_that_write_into_actions():
    """Environments may write into their actions, and keep them: nobody else does, and the array of the caller stays."""
    env = ParallelVecEnv([InPlace] * 4, n_workers=1, **FORK)
    env.reset()
    actions = np.zeros((4, 2), np.float32)
    for _ in range(5):
        env.step(actions)
    assert (actions == 0).all()
    env.close()


def test_seeds_and_options():
    """Seeds and options count for one reset, and each environment has its own."""
    env = ParallelVecEnv([Asked] * 4, n_workers=2, **FORK)
    assert env.seed(5) == [5, 6, 7, 8]
    env.set_options([{"level": level} for level in range(3)] + [{}])
    env.reset(), env.reset()
    expected = [[(5 + k, {"level": k} if k < 3 else None), (None, None)] for k in range(4)]
    assert env.get_attr("asked") == expected
    env.set_options({"level": 1})
    env.reset()
    assert [asked[-1] for asked in env.get_attr("asked")] == [(None, {"level": 1})] * 4
    env.close()


class Named(ToyEnv):
    """Has attributes, and methods."""

    render_mode = "rgb_array"

    def __init__(self, index):
        super().__init__()
        self.index = index

    def add(self, number, times=1):
        return self.index + number * times

    def fail(self):
        raise KeyError("on purpose")

    def render(self):
        return np.full((2, 3, 3), self.index, np.uint8)


@pytest.fixture
def named():
    """DummyVecEnv and ParallelVecEnv with the same environments."""
    fns = [lambda index=index: Named(index) for index in range(5)]
    both = DummyVecEnv(fns), ParallelVecEnv(fns, n_workers=2, **FORK)
    yield both
    for env in both:
        env.close()


def test_nothing_between_the_halves_of_a_step():
    """A call after `step_async` takes the answers of the workers, and `step_wait` says so; the next step works."""
    env = ParallelVecEnv(env_fns(), n_workers=1, **FORK)
    env.reset()
    actions = np.array([env.action_space.sample() for _ in range(env.num_envs)])
    env.step_async(actions)
    env.has_attr("index")
    with pytest.raises(RuntimeError, match="no other call in between"):
        env.step_wait()
    assert len(env.step(actions)[1]) == env.num_envs
    env.close()


def test_attributes_and_methods(named):
    """Attributes and methods by name, and for single environments in any order, are those of DummyVecEnv."""
    for env in named:
        assert env.get_attr("index") == [0, 1, 2, 3, 4]
        assert env.get_attr("index", indices=[4, 0, 4, -2]) == [4, 0, 4, 3]
        assert env.get_attr("index", indices=3) == [3]
        assert env.env_method("add", 10, times=2) == [20, 21, 22, 23, 24]
        assert env.env_method("add", 10, indices=[3]) == [13]
        env.set_attr("length", 2)
        env.set_attr("length", 3, indices=[1, 4])
        assert env.get_attr("length") == [2, 3, 2, 2, 3]
        assert env.env_is_wrapped(Monitor) == [False] * 5
        assert env.env_is_wrapped(Monitor, indices=2) == [False]
        assert env.has_attr("index")
        assert not env.has_attr("no_such_name")
        with pytest.raises(IndexError):
            env.get_attr("index", indices=[5])
    wrapped = ParallelVecEnv(env_fns(), n_workers=1, **FORK)
    assert wrapped.env_is_wrapped(Monitor) == [True] * 5
    assert wrapped.env_is_wrapped(gym.Wrapper) == [True] * 5
    wrapped.close()


def test_wrapper_of_the_script(monkeypatch):
    """A wrapper that the script defines, which travels by value, is found in all processes."""

    class Own(gym.Wrapper):
        pass

    Own.__module__, Own.__qualname__ = "__main__", "Own"
    monkeypatch.setattr(sys.modules["__main__"], "Own", Own, raising=False)
    env = ParallelVecEnv([lambda: Own(gym.make("CartPole-v1"))] * 2, n_workers=1, start_method="fork")
    assert env.env_is_wrapped(Own) == [True, True]
    assert env.env_is_wrapped(Monitor) == [False, False]
    env.close()


def test_errors_of_methods(named):
    """Errors of attributes and methods are those of DummyVecEnv, with the traceback of the worker, and all goes on."""
    _, env = named
    for indices in (None, [0], [4]):
        with pytest.raises(KeyError, match="on purpose") as caught:
            env.env_method("fail", indices=indices)
        if indices == [4]:
            assert "in fail" in str(caught.value.__cause__)
        with pytest.raises(AttributeError, match="no_such_name"):
            env.get_attr("no_such_name", indices=indices)
    with pytest.raises(TypeError, match="pickle"):
        env.set_attr("lock", threading.Lock())
    env.set_attr("function", lambda: 5)
    env.reset()
    env.step(np.zeros((5, 2), np.float32))


def test_images(named):
    """Images are those of DummyVecEnv, in the order of the environments."""
    for get in (lambda env: np.array(env.get_images()), lambda env: env.render("rgb_array")):
        np.testing.assert_array_equal(*map(get, named))
    env = ParallelVecEnv([ToyEnv] * 2, n_workers=1, **FORK)
    with pytest.warns(UserWarning, match="render mode is None"):
        assert env.get_images() == [None, None]
    env.close()


def test_call_in_workers(named):
    """A function is called with each environment, in its process, with its own arguments."""
    _, env = named
    assert env.call_in_workers(add_to_attribute, [("index", n) for n in range(5)]) == [(n, 2 * n) for n in range(5)]
    assert env.get_attr("index") == [0, 2, 4, 6, 8]
    with pytest.raises(ValueError, match="`args_per_env="):
        env.call_in_workers(add_to_attribute, [("index", 1)])


WRAPPERS = {
    "normalized": (VECTOR, lambda env: VecNormalize(VecMonitor(env))),
    "stacked": (VECTOR, lambda env: VecFrameStack(env, 3)),
    "transposed": (IMAGE, VecTransposeImage),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers(name):
    """In SB3's wrappers, the results are those of DummyVecEnv in them."""
    space, wrap = WRAPPERS[name]
    seen = []
    for env in (DummyVecEnv(env_fns(space)), ParallelVecEnv(env_fns(space), n_workers=2, **FORK)):
        seen.append(without_clock(rollout(wrap(env))))
        env.close()
    assert_equal(*seen)


def test_training_is_that_of_one_process():
    """A training ends with the same weights, to the bit, as in FastDummyVecEnv, also without the extension module."""
    trained = []
    for cls, kwargs in ((FastDummyVecEnv, {}), (ParallelVecEnv, FORK), (ParallelVecEnv, dict(n_workers=3, **FORK))):
        env = make_vec_env("CartPole-v1", 4, seed=1, vec_env_cls=cls, vec_env_kwargs=kwargs)
        model = PPOExt("MlpPolicy", env, n_steps=64, batch_size=64, seed=1, device="cpu").learn(1024)
        trained.append((model.policy.state_dict(), [info["r"] for info in model.ep_info_buffer]))
        env.close()
    for state, rewards in trained[1:]:
        assert_equal(trained[0][0], state, "policy")
        assert rewards == trained[0][1]


def test_make_vec_env_with_monitor_files(tmp_path):
    """`make_vec_env` takes it, and each environment writes its file of Monitor."""
    kwargs = dict(vec_env_cls=ParallelVecEnv, vec_env_kwargs=dict(n_workers=1, **FORK), monitor_dir=str(tmp_path))
    env = make_vec_env("CartPole-v1", 3, seed=0, **kwargs)
    env.reset()
    for _ in range(60):
        env.step(np.zeros(3, np.int64))
    env.close()
    for index in range(3):
        assert len((tmp_path / f"{index}.monitor.csv").read_text().splitlines()) > 5


def test_cores(monkeypatch, tmp_path):
    """By default there is a process on each core that may be used, with regard to affinity and control group."""
    available = cores.available_cores()
    assert 1 <= available <= (os.cpu_count() or 1)
    env = ParallelVecEnv([ToyEnv] * 3, **FORK)
    assert env.n_workers == min(available - 1, 2)
    env.close()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(cores, "CGROUPS", tmp_path)
    assert cores.available_cores() == 8
    for text, expected in (("max 100000", 8), ("250000 100000", 3), ("10000 100000", 1), ("nonsense", 8)):
        (tmp_path / "cpu.max").write_text(text)
        assert cores.available_cores() == expected


@pytest.mark.parametrize(("n_ranks", "n_workers"), [(1, 7), (4, 1), (8, 0), (9, 0)])
def test_ranks_share_the_cores(monkeypatch, n_ranks, n_workers):
    """Ranks that torchrun has started on a machine have no more processes than it has cores."""
    monkeypatch.setattr(vec_env, "available_cores", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(n_ranks))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    env = ParallelVecEnv([ToyEnv] * 10, **FORK)
    assert env.n_workers == n_workers
    env.close()


def test_a_training_resumes(tmp_path):
    """A training resumes from a reset of the environments, and says so."""

    def make():
        return make_vec_env("CartPole-v1", 4, seed=1, vec_env_cls=ParallelVecEnv, vec_env_kwargs=dict(n_workers=1, **FORK))

    env = make()
    model = PPOExt("MlpPolicy", VecNormalize(env), n_steps=32, batch_size=64, seed=1, device="cpu")
    with pytest.warns(UserWarning, match="will start with a reset"):
        model.learn(256, callback=TrainingCheckpoint(32, tmp_path))
    env.close()
    env = make()
    resumed = PPOExt.resume(tmp_path, VecNormalize(env), device="cpu")
    with pytest.warns(UserWarning, match="from a reset of the environments"):
        resumed.learn(512)
    assert resumed.num_timesteps >= 512
    env.close()


def test_a_restored_state_leaves_the_shared_memory():
    """A checkpoint that is written to the environments, as of a callback, does not take them out of the shared memory."""
    env = ParallelVecEnv(env_fns(), n_workers=1, **FORK)
    env.reset()
    targets = stateful_objects(env)
    ObjectState(targets).write(ObjectState(targets).read())
    assert_equal(without_clock(rollout(DummyVecEnv(env_fns()))), without_clock(rollout(env)))
    env.close()


def test_the_zoo(train_here):
    """With ``--vec-env subproc``, RL Zoo trains ``ppo_ext`` in it, where it pays."""
    made = []
    original = ParallelVecEnv.__init__

    def init(self, *args, **kwargs):
        made.append(type(self))
        original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParallelVecEnv, "__init__", init)
        patch.setattr(choice_of_vec_env, "COST", 0.0)  # as on a machine whose environments are slow
        train_here("--env", "CartPole-v1", "-n", "256", "--vec-env", "subproc", "-params", "n_envs:4", "n_steps:32")
    assert made
    gc.collect()
