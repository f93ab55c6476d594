"""Environments in processes that fail, hang, are killed or interrupted are named, and nothing of them is left."""

import gc
import itertools
import multiprocessing as mp
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from copy import deepcopy

import numpy as np
import pytest
from gymnasium import spaces
from support.cases import one_in
from support.engines import SMALL
from support.processes import listen_to_ctrl_c
from support.toys import DICT, VECTOR, ToyEnv
from support.vec_envs import FORK, Slow, interrupted, nothing_is_left, steps

from sb3_ppo_ext import ParallelVecEnv, PPOExt, WorkerError

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform == "win32", reason="workers are forked, which is faster"),
]
_nothing_is_left = pytest.fixture(autouse=True)(nothing_is_left)


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


def test_close_beside_processes_that_were_forked_later():
    """Processes that were forked later have copies of all pipes, and do not keep the workers from ending."""
    env = ParallelVecEnv([ToyEnv] * 3, n_workers=2, timeout=20.0, **FORK)
    other = mp.get_context("fork").Process(target=time.sleep, args=(60,))
    other.start()
    env.close()
    assert [process.exitcode for process in env.processes] == [0, 0]
    other.kill()
    other.join()


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
    env = ParallelVecEnv([lambda: Slow(0.0)] * 3, n_workers=2, **FORK)
    env.seed(0)
    first = env.reset()

    for delay in (0.05, 0.25):  # while this process steps, and while it waits
        env.set_attr("delay", 0.2, indices=[0])
        env.set_attr("delay", 0.3, indices=[1, 2])
        with interrupted(env, delay):
            steps(env, 1)
        env.set_attr("delay", 0.0)
        assert env.get_attr("t")[1:] == [1, 1]
        env.seed(0)
        np.testing.assert_array_equal(env.reset(), first)
    env.close()
    assert [process.exitcode for process in env.processes] == [0, 0]


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


WAYS = ("fork", "fork idle", "forkserver")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="processes are looked for in /proc")
# One in four would have each signal and each way once; SIGTERM, and workers that are idle, are left to `make test-slow`.
@pytest.mark.parametrize("way_and_signal", one_in(8, itertools.product(WAYS, SIGNALS)), ids=str)
def test_the_main_process_ends(way_and_signal, tmp_path):
    """However the main process ends, while it steps or does something else, the workers end, and no memory is left."""
    way, number = way_and_signal
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(path), *way.split()]
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


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("made", ["ParallelVecEnv(fns, n_workers=1, start_method='spawn')", "CheckedSubprocVecEnv(fns)"])
def test_script_without_a_guard(made, tmp_path):
    """A script that starts processes while they import it is told what it lacks."""
    script = tmp_path / "script.py"
    script.write_text(
        "import gymnasium as gym\nfrom sb3_ppo_ext import CheckedSubprocVecEnv, ParallelVecEnv\n"
        f"fns = [lambda: gym.make('CartPole-v1')] * 2\n{made}\n"
    )
    result = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert result.returncode == 1
    assert 'has to stand under `if __name__ == "__main__":`' in result.stderr.splitlines()[-1]
