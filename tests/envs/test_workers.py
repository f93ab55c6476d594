"""Environments in processes that die, raise, hang or are interrupted: the worker is named, and the model stays usable."""

import gc
import multiprocessing
import os
import signal
import sys
import time
from functools import partial

import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv
from stable_baselines3.common.callbacks import CallbackList, EvalCallback, EveryNTimesteps
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecMonitor, VecNormalize
from support.cases import one_in
from support.engines import SMALL
from support.parity import assert_equal
from support.toys import ToyEnv
from support.vec_envs import Slow, add_to_attribute, interrupted, steps

from sb3_ppo_ext import CheckedSubprocVecEnv, ParallelVecEnv, PPOExt, VectorEnvAdapter, WorkerError

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform == "win32", reason="workers are forked, which is faster"),
]


class Failing(ToyEnv):
    """Fails in its fifth step, counted over all episodes, or where ``how`` says."""

    def __init__(self, how):
        super().__init__()
        self.how, self.age = how, 0
        if how == "no constructor":
            raise KeyError("cannot be made")

    def reset(self, **kwargs):
        if self.how == "no reset":
            raise KeyError("cannot be reset")
        return super().reset(**kwargs)

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        self.age += 1
        if self.age == 5:
            info = self.fail()
        return observation, reward, terminated, truncated, info

    def fail(self):
        if self.how == "raises":
            raise KeyError("broken")
        if self.how == "raises EOFError":
            raise EOFError
        if self.how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "leaves":
            os._exit(3)
        if self.how == "says goodbye":
            sys.exit("goodbye")
        if self.how == "hangs":
            time.sleep(1000)
        return {"function": lambda: None}  # cannot be pickled


class Stubborn(ToyEnv):
    """Its process does not end on SIGTERM, as where it was forked after SDL has opened a window."""

    def reset(self, **kwargs):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return super().reset(**kwargs)


def make(cls, how, index, **kwargs):
    env_fns: list = [ToyEnv, Stubborn, ToyEnv]
    env_fns[index] = lambda: Failing(how)
    return cls(env_fns, start_method="fork", **kwargs)


def assert_ended(env):
    assert not any(process.is_alive() for process in env.processes)
    env.close()
    with pytest.raises((WorkerError, OSError), match=r"ended|closed"):
        env.reset()


def assert_model_survives(model, env, message, tmp_path):
    """The model refuses the rollout with the message, is as it was before, and can do all that it could."""
    wrapped = VecNormalize(VecMonitor(env))
    model.set_env(wrapped)
    before = {name: value.clone() for name, value in model.policy.state_dict().items()}
    count = model.num_timesteps
    with pytest.raises(WorkerError, match=message) as caught:
        model.learn(96, reset_num_timesteps=False)
    assert "set_env" in str(caught.value)
    assert model.num_timesteps == count
    assert_equal(before, model.policy.state_dict(), "policy")
    assert wrapped.obs_rms.count < 4  # no more than the reset before the rollout
    model.predict(np.zeros(3, np.float32))
    model.save(tmp_path / "model")
    model.set_env(DummyVecEnv([ToyEnv] * 3))
    assert model.learn(48, reset_num_timesteps=False).num_timesteps == count + 48


@pytest.fixture(scope="module")
def model():
    return PPOExt("MlpPolicy", DummyVecEnv([ToyEnv] * 3), **SMALL)


FAILURES = {
    "raises": r"Worker 1 \(of .* to 2.*\) has raised an error(.|\n)*in fail\n(.|\n)*KeyError: 'broken'",
    "raises EOFError": r"Worker 1 \(of .* to 2.*\) has raised an error(.|\n)*EOFError",
    "is killed": r"Worker 1 \(of .* to 2.*\) was killed by SIGKILL, perhaps .* memory",
    "leaves": r"Worker 1 \(of .* to 2.*\) has died with exit code 3",
    "says goodbye": r"Worker 1 (.|\n)*SystemExit: goodbye",
    "answers with what cannot be pickled": r"Worker 1 (.|\n)*pickle",
    "no reset": r"Worker 1 (.|\n)*KeyError: 'cannot be reset'",
}


def parallel(env_fns, **kwargs):
    """A `ParallelVecEnv` in whose main process is one environment, and one in each worker."""
    return ParallelVecEnv(env_fns, n_workers=len(env_fns) - 1, **kwargs)


CLASSES = pytest.mark.parametrize("cls", [CheckedSubprocVecEnv, parallel], ids=["checked", "parallel"])


@CLASSES
@pytest.mark.parametrize("how", one_in(2, FAILURES))
def test_failure(how, cls, model, tmp_path):
    """The worker is named with its traceback or exit code, all others are ended, and the model can go on with others."""
    env = make(cls, how, 1)
    assert_model_survives(model, env, FAILURES[how], tmp_path)
    assert_ended(env)


def test_hanging(model, tmp_path):
    """Workers that do not answer in time are named, and ended."""
    env_fns = [ToyEnv, lambda: Failing("hangs"), ToyEnv, lambda: Failing("hangs")]
    env = CheckedSubprocVecEnv(env_fns, start_method="fork", timeout=0.5)
    env.reset()
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"No answer in 0\.5 seconds: Worker 1 \(of 0 to 3\), Worker 3 \(of 0 to 3\)\."):
        steps(env, 5)
    assert time.monotonic() - start < 60
    assert not any(process.is_alive() for process in env.processes)
    assert_model_survives(model, make(CheckedSubprocVecEnv, "hangs", 0, timeout=0.5), "No answer .* Worker 0", tmp_path)


@CLASSES
def test_constructor(cls):
    """An environment that cannot be made is named, and no process is left."""
    before = multiprocessing.active_children()
    with pytest.raises(WorkerError, match=r"Worker 2 (.|\n)*KeyError: 'cannot be made'"):
        make(cls, "no constructor", 2)
    assert multiprocessing.active_children() == before


def test_environments_named_twice():
    """An environment that is chosen twice answers twice, as in `DummyVecEnv`; none is waited for forever."""
    env = CheckedSubprocVecEnv([Counting, Counting], start_method="fork", timeout=20)
    assert env.env_method("count", 2, indices=[0, 0, -1]) == [2, 4, 2]
    assert env.get_attr("counted", indices=[1, 0, 1]) == [2, 4, 2]
    env.set_attr("counted", 7, indices=[1, 1])
    assert env.env_is_wrapped(Monitor, indices=[1, 1]) == [False, False]
    assert env.get_attr("counted") == [4, 7]
    env.close()


class Counting(ToyEnv):
    counted = 0

    def count(self, n):
        self.counted += n
        return self.counted


def test_bad_arguments():
    """Bad arguments are named with their value."""
    with pytest.raises(ValueError, match=r"`env_fns=\[\]`"):
        CheckedSubprocVecEnv([])
    for timeout in (0, -1.0, "1", float("nan")):
        with pytest.raises(ValueError, match="`timeout="):
            CheckedSubprocVecEnv([ToyEnv], timeout=timeout)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", r"Worker 0 \(of 0 to 2\) of SubprocVecEnv has died with exit code 1 .*CheckedSubprocVecEnv"),
        ("is killed", r"Worker 0 \(of 0 to 2\) of SubprocVecEnv was killed by SIGKILL"),
        ("no reset", r"Worker 0 \(of 0 to 2\) of SubprocVecEnv has died with exit code 1"),
    ],
)
def test_workers_of_sb3(how, message, model, tmp_path):
    """A dead worker of SB3's own class is named as well, and its `close` does not wait for it."""
    env = make(SubprocVecEnv, how, 0)
    assert_model_survives(model, env, message, tmp_path)
    assert_ended(env)


WAYS = {
    "raises": "exit code 1|KeyError: 'broken'",
    "is killed": "was killed by SIGKILL",
    "leaves": "exit code 3",
    "says goodbye": "exit code 1|SystemExit: goodbye",
}


@pytest.mark.parametrize("index", one_in(2, [0, 1, 2]))
@pytest.mark.parametrize(
    ("cls", "start_method"),
    [
        (SubprocVecEnv, "fork"),
        *(pytest.param(cls, "fork", marks=pytest.mark.slow) for cls in (CheckedSubprocVecEnv, parallel)),
        *(
            pytest.param(cls, method, marks=pytest.mark.slow)
            for cls in (SubprocVecEnv, CheckedSubprocVecEnv, parallel)
            for method in ("forkserver", "spawn")
        ),
    ],
)
@pytest.mark.parametrize("how", WAYS)
def test_each_worker(how, cls, start_method, index, model):
    """Whichever worker ends, and in whatever way: training ends with its name, and nothing waits for it."""
    if cls is parallel and index == 0:
        pytest.skip("it is in the main process")
    env_fns: list = [ToyEnv] * 3
    env_fns[index] = partial(Failing, how)
    env = cls(env_fns, start_method=start_method)
    model.set_env(VecMonitor(env))
    with pytest.raises(WorkerError, match=rf"(?s)Worker {index} .*({WAYS[how]})"):
        model.learn(48)
    assert not any(process.is_alive() for process in env.processes)
    env.close()


def test_workers_of_an_evaluation(model):
    """When a worker of the environments of an `EvalCallback` ends, training ends with its name."""
    env = SubprocVecEnv([ToyEnv, partial(Failing, "leaves"), ToyEnv], start_method="fork")
    model.set_env(DummyVecEnv([ToyEnv] * 3))
    evaluation = EvalCallback(VecMonitor(env), n_eval_episodes=3, eval_freq=1, verbose=0)
    with pytest.raises(WorkerError, match=r"Worker 1 .*exit code 3"):
        model.learn(48, EveryNTimesteps(8, CallbackList([evaluation])))
    assert not any(process.is_alive() for process in env.processes)


def test_pipes_of_sb3_are_left_alone(model):
    """After a rollout, an environment has the pipes that it was made with."""
    env = make_vec_env(ToyEnv, 3, vec_env_cls=SubprocVecEnv, vec_env_kwargs=dict(start_method="fork"))
    before = env.remotes
    model.set_env(env)
    model.learn(48)
    assert env.remotes is before
    env.close()


def test_workers_of_gymnasium(tmp_path):
    """A dead worker of Gymnasium's is named."""
    env = VectorEnvAdapter(AsyncVectorEnv([ToyEnv] * 3, context="fork"))
    os.kill(env.processes[2].pid, signal.SIGKILL)
    model = PPOExt("MlpPolicy", DummyVecEnv([ToyEnv] * 3), **SMALL)
    assert_model_survives(model, env, r"Worker 2 \(of 0 to 2\) of VectorEnvAdapter was killed by SIGKILL", tmp_path)
    env.venv.close(terminate=True)


@CLASSES
def test_errors_that_are_not_of_a_worker(cls):
    """An error of a file in a callback passes, since all workers are alive."""
    env = cls([ToyEnv] * 2, start_method="fork")

    def callback(local, _):
        raise FileNotFoundError("no such file")

    with pytest.raises(FileNotFoundError, match="no such file"):
        PPOExt("MlpPolicy", env, **SMALL).learn(32, callback=callback)
    env.close()


def test_interrupt():
    """Ctrl-C interrupts the main process alone. Answers that come too late are not taken for those of later commands."""
    env = CheckedSubprocVecEnv([partial(Slow, delay=0.3)] * 2, start_method="fork")
    env.seed(0)
    first = env.reset()

    with interrupted(env, 0.1):
        steps(env, 1)
    assert env.get_attr("t") == [1, 1]
    env.seed(0)
    np.testing.assert_array_equal(env.reset(), first)
    env.step_async(np.zeros((2, 2), np.float32))
    env.close()
    assert [process.exitcode for process in env.processes] == [0, 0]
    env.close()


def test_call_in_workers():
    """A function is called in each worker with its own arguments."""
    env = CheckedSubprocVecEnv([ToyEnv] * 3, start_method="fork")
    assert env.call_in_workers(add_to_attribute, [("length", n) for n in range(3)]) == [(7, 7), (7, 8), (7, 9)]
    assert env.get_attr("length") == [7, 8, 9]
    with pytest.raises(ValueError, match="zip"):
        env.call_in_workers(add_to_attribute, [("length", 1)])
    env.reset()
    with pytest.raises(WorkerError, match=r"Worker 0 (.|\n)*no_such_name"):
        env.call_in_workers(add_to_attribute, [("no_such_name", 1)] * 3)


def test_no_process_is_left():
    """The workers of an environment that nobody closes end with it."""
    env = CheckedSubprocVecEnv([ToyEnv] * 2, start_method="fork")
    env.step_async(np.zeros((2, 2), np.float32))
    processes = env.processes
    del env
    gc.collect()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0]
