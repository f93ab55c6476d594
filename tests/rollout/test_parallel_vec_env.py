"""Environments in few processes with many each say what DummyVecEnv says, whatever happens."""

import gc
import multiprocessing as mp
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from copy import deepcopy

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
from support.engines import SMALL
from support.parity import assert_equal
from support.toys import DICT, IMAGE, VECTOR, ToyEnv
from support.vec_envs import Plain, Talkative, assert_same, rollout, without_clock

from sb3_ppo_ext import FastDummyVecEnv, ParallelVecEnv, PPOExt, TrainingCheckpoint, WorkerError
from sb3_ppo_ext.checkpoints.object_state import ObjectState, stateful_objects
from sb3_ppo_ext.common import cores
from sb3_ppo_ext.rollout.parallel import flags, shared_arrays

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform == "win32", reason="workers are forked, which is faster"),
]
FORK = dict(start_method="fork")
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


@pytest.fixture(autouse=True)
def _nothing_is_left():
    """No process and no shared memory outlives a test."""
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    yield
    if mp.active_children():
        gc.collect()
    assert not mp.active_children()
    assert not os.path.isdir("/dev/shm") or set(os.listdir("/dev/shm")) <= before


def same_as_dummy(fns, n_steps=40, **kwargs):
    env = ParallelVecEnv(fns, **kwargs)
    try:
        seen = rollout(env, n_steps), env.metadata, env.render_mode
    finally:
        env.close()
    dummy = DummyVecEnv(fns)
    expected = rollout(dummy, n_steps), dummy.metadata, dummy.render_mode
    assert_same(without_clock(list(expected)), without_clock(list(seen)))


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
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


@pytest.mark.parametrize("n_workers", [0, 1, 2, 3, 4, 9])
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


class Slow(Plain):
    delay = 0.01

    def step(self, action):
        time.sleep(self.delay)
        return super().step(action)


def test_what_a_step_returns_stays():
    """Environments that write their observations and infos in place change nothing that was returned, in any process."""
    seen = [rollout(ParallelVecEnv(env_fns(cls=cls, n_envs=4), n_workers=1, **FORK)) for cls in (Talkative, Plain)]
    assert_same(*map(without_clock, seen))


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


class Asked(ToyEnv):
    """Remembers with what it was reset."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def reset(self, *, seed=None, options=None):
        self.asked.append((seed, options))
        return super().reset(seed=seed)


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
    wrapped.close()


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


def add_to_attribute(env, name, number):
    """Change an attribute of an environment, and return both values."""
    before = env.get_wrapper_attr(name)
    env.set_wrapper_attr(name, before + number)
    return before, env.get_wrapper_attr(name)


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
    assert_same(*seen)


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


# Errors


class Failing(ToyEnv):
    """Fails in its fifth step."""

    def __init__(self, how="raises"):
        super().__init__(p_end=0)  # At the end of an episode, the first observation of the next one takes its place.
        self.how, self.age = how, 0

    def step(self, action):
        observation, *rest = super().step(action)
        self.age += 1
        if self.age == 5:
            if isinstance(self.how, str):
                raise KeyError("broken")
            observation = self.how
        return observation, *rest


def steps(env, n):
    for _ in range(n):
        env.step(np.zeros((env.num_envs, 2), np.float32))


@pytest.mark.parametrize("index", range(4))
def test_an_error_names_its_environment(index):
    """Whether it is in this process or in another one, an error of an environment is a WorkerError that names it."""
    fns = [ToyEnv] * 4
    fns[index] = Failing
    env = ParallelVecEnv(fns, n_workers=1, **FORK)
    env.reset()
    where = f"Environment {index}, in the main process," if index < 2 else f"Worker 1 .* in environment {index}:"
    with pytest.raises(WorkerError, match=rf"{where}(.|\n)*in step\n(.|\n)*KeyError: 'broken'"):
        steps(env, 5)
    with pytest.raises(WorkerError, match="closed"):
        env.reset()
    env.close()


@pytest.mark.parametrize("index", [0, 3])
@pytest.mark.parametrize("observation", [np.zeros(2), np.zeros((2, 3)), 5.0], ids=["short", "long", "number"])
def test_observations_of_another_shape(index, observation):
    """An observation of another shape is refused with its environment, in any process, and a reset goes on."""
    fns = [ToyEnv] * 4
    fns[index] = lambda: Failing(observation)
    env = ParallelVecEnv(fns, n_workers=1, **FORK)
    env.reset()
    with pytest.raises(ValueError, match=rf"Environment {index}: the observation has the shape .*must have \(3,\)"):
        steps(env, 5)
    env.reset()
    steps(env, 3)
    env.close()


def test_no_observations_that_are_not_finite():
    """PPOExt names the environment and the step of NaN, in any process."""
    for index in (0, 3):
        fns = [ToyEnv] * 4
        fns[index] = lambda: Failing(np.full(3, np.nan, np.float32))
        env = ParallelVecEnv(fns, n_workers=1, **FORK)
        with pytest.raises(ValueError, match=rf"Environment {index}: the observation is not finite .* at step 4"):
            PPOExt("MlpPolicy", env, **SMALL).learn(64)
        env.close()


def test_the_same_environment_twice():
    """Functions that return the same environment are refused as by DummyVecEnv, in any process."""
    one = ToyEnv()
    with pytest.raises(ValueError, match="same instance"):
        ParallelVecEnv([lambda: one] * 4, n_workers=1, **FORK)
    fns = [ToyEnv, ToyEnv, lambda: one, lambda: one]
    with pytest.raises(WorkerError, match="same instance"):
        ParallelVecEnv(fns, n_workers=1, **FORK)


ARGUMENTS = [
    ("env_fns", dict(env_fns=[])),
    ("env_fns", dict(env_fns=ToyEnv)),
    ("env_fns", dict(env_fns=[ToyEnv()])),
    *(("n_workers", dict(n_workers=value)) for value in (-1, 1.5, True, "2")),
    *(("timeout", dict(timeout=value)) for value in (0, -1.0, "1", float("nan"))),
    *(("start_method", dict(start_method=value)) for value in ("thread", 5)),
]


@pytest.mark.parametrize(("name", "kwargs"), ARGUMENTS)
def test_bad_arguments(name, kwargs):
    """Bad arguments are named with their value."""
    with pytest.raises(ValueError, match=f"`{name}="):
        ParallelVecEnv(**{"env_fns": [ToyEnv] * 2, **kwargs})


@pytest.mark.parametrize(
    "space",
    [spaces.Text(5), spaces.Sequence(VECTOR), spaces.Dict({"a": DICT}), spaces.Graph(VECTOR, None)],
    ids=lambda space: type(space).__name__,
)
def test_unknown_spaces(space):
    """Observations that are no arrays of numbers are refused."""
    with pytest.raises(ValueError, match="observation space"):
        ParallelVecEnv([lambda: ToyEnv(observation_space=space)] * 2, n_workers=1, **FORK)


def test_close():
    """It can be closed twice, with a step under way, and is then refused; its environments are closed."""
    env = ParallelVecEnv([Slow] * 3, n_workers=2, **FORK)
    env.reset()
    env.step_async(np.zeros((3, 2), np.float32))
    env.close()
    env.close()
    assert [process.exitcode for process in env.processes] == [0, 0]
    for use in (env.reset, lambda: env.get_attr("t"), lambda: steps(env, 1)):
        with pytest.raises(WorkerError, match="closed"):
            use()


class Closing(Failing):
    """Leaves a file when it is closed."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def close(self):
        self.path.write_text("closed")


def test_all_environments_are_closed(tmp_path):
    """Environments of all processes are closed, also after one of them has failed."""
    env = ParallelVecEnv([lambda i=i: Closing(tmp_path / str(i)) for i in range(4)], n_workers=1, **FORK)
    env.reset()
    with pytest.raises(WorkerError, match="in the main process"):
        steps(env, 5)
    env.close()
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="times are looked for in /proc")
def test_workers_that_wait_use_no_core():
    """Between two rollouts, the workers sleep."""
    env = ParallelVecEnv([ToyEnv] * 3, n_workers=2, **FORK)
    env.reset()
    steps(env, 3)
    time.sleep(0.1)
    before = [processor_time(process.pid) for process in env.processes]
    time.sleep(0.5)
    assert [processor_time(process.pid) for process in env.processes] == before
    env.close()


def processor_time(pid):
    with open(f"/proc/{pid}/stat") as file:
        return [int(word) for word in file.read().rpartition(")")[2].split()[11:13]]


def test_copies_are_refused():
    """It can be neither pickled nor copied."""
    env = ParallelVecEnv([ToyEnv] * 2, n_workers=1, **FORK)
    for copy in (pickle.dumps, deepcopy):
        with pytest.raises(pickle.PicklingError, match="several processes"):
            copy(env)
    env.close()


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


# Kills and interrupts


def test_a_worker_that_hangs():
    """A worker that does not answer in time is named with its environments, and ended."""
    env = ParallelVecEnv([ToyEnv, lambda: Hanging(), ToyEnv, lambda: Hanging()], n_workers=3, timeout=0.5, **FORK)
    env.reset()
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"No answer in 0\.5 s.*: Worker 1 .*environment 1\), Worker 3 .*environment 3\)"):
        steps(env, 1)
    assert time.monotonic() - start < 30
    assert not any(process.is_alive() for process in env.processes)


class Hanging(ToyEnv):
    def step(self, action):
        time.sleep(1000)


@pytest.mark.parametrize("moment", ["stepping", "between"])
def test_a_worker_that_is_killed(moment):
    """A worker that was killed is named with its environments, during a step and between two."""
    env = ParallelVecEnv([Slow] * 4, n_workers=1, **FORK)
    env.reset()
    if moment == "stepping":
        env.step_async(np.zeros((4, 2), np.float32))
    os.kill(env.processes[0].pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"Worker 1 .*environments 2 to 3\) was killed by SIGKILL"):
        env.step_wait() if moment == "stepping" else steps(env, 1)


def test_interrupt():
    """Ctrl-C interrupts the main process alone. Answers that come too late are not taken for those of later commands."""
    env = ParallelVecEnv([Slower] * 3, n_workers=2, **FORK)
    env.seed(0)
    first = env.reset()

    def interrupt(*_):
        for process in env.processes:
            os.kill(process.pid, signal.SIGINT)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for delay in (0.05, 0.25):  # while this process steps, and while it waits
            env.set_attr("delay", 0.2, indices=[0])
            env.set_attr("delay", 0.3, indices=[1, 2])
            signal.setitimer(signal.ITIMER_REAL, delay)
            with pytest.raises(KeyboardInterrupt):
                steps(env, 1)
            env.set_attr("delay", 0.0)
            assert env.get_attr("t")[1:] == [1, 1]
            env.seed(0)
            np.testing.assert_array_equal(env.reset(), first)
    finally:
        signal.signal(signal.SIGALRM, before)
    env.close()
    assert [process.exitcode for process in env.processes] == [0, 0]


class Slower(Slow):
    delay = 0.0


def test_an_interrupted_message_is_refused():
    """If an interrupt has torn a message, the next command says so, and the workers end."""
    env = ParallelVecEnv([ToyEnv] * 2, n_workers=1, **FORK)
    env._pool.is_torn = True
    with pytest.raises(WorkerError, match="was interrupted"):
        env.reset()
    assert not env.processes[0].is_alive()


def test_no_process_is_left():
    """The workers of an environment that nobody closes end with it, also those that hang."""
    for slow in (ToyEnv, Hanging):
        env = ParallelVecEnv([ToyEnv, slow, slow], n_workers=2, **FORK)
        env.step_async(np.zeros((3, 2), np.float32))
        processes = env.processes
        del env
        gc.collect()
        assert not any(process.is_alive() for process in processes)


SCRIPT = """
import os, sys, time
import numpy as np
from support.toys import ToyEnv
from sb3_ppo_ext import ParallelVecEnv

if __name__ == "__main__":
    env = ParallelVecEnv([ToyEnv] * 4, n_workers=2, start_method=sys.argv[1])
    env.reset()
    print(*[process.pid for process in env.processes], flush=True)
    while True:
        env.step(np.zeros((4, 2), np.float32))
        if len(sys.argv) > 2:
            time.sleep(1000)
"""


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def listen_to_ctrl_c():
    """What a shell starts in the background ignores SIGINT, and so do its children, unless they are told not to."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="processes are looked for in /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    "arguments", [["fork"], ["fork", "idle"], pytest.param(["forkserver"], marks=pytest.mark.slow)], ids=" ".join
)
def test_the_main_process_ends(arguments, number, tmp_path):
    """However the main process ends, while it steps or does something else, the workers end, and no memory is left."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(path), *arguments]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(command, env=environment, preexec_fn=listen_to_ctrl_c, **pipes) as process:
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        time.sleep(0.1)
        process.send_signal(number)
        errors = process.communicate(timeout=60)[1]
    assert "leaked" not in errors
    deadline = time.monotonic() + 20
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))


# Checkpoints and the Zoo


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
    assert_same(without_clock(rollout(DummyVecEnv(env_fns()))), without_clock(rollout(env)))
    env.close()


def test_the_zoo(train_here, tmp_path):
    """With ``--vec-env subproc``, RL Zoo trains ``ppo_ext`` in it."""
    made = []
    original = ParallelVecEnv.__init__

    def init(self, *args, **kwargs):
        made.append(type(self))
        original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParallelVecEnv, "__init__", init)
        train_here("--env", "CartPole-v1", "-n", "256", "--vec-env", "subproc", "-params", "n_envs:4", "n_steps:32")
    assert made
    gc.collect()
