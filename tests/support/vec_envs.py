"""What vectorised environments say, step by step, and environments that say much."""

import gc
import multiprocessing as mp
import os
import signal
import sys
import time
from contextlib import contextmanager
from copy import deepcopy

import numpy as np
import pytest
from support.toys import ToyEnv

FORK = dict(start_method="fork")


class Talkative(ToyEnv):
    """Its infos have numbers, arrays and words, not at every step; it writes its observations into one array."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        # Random numbers of its own, as in a process of its own
        self.observation_space = deepcopy(self.observation_space)
        self.info, self.array = {}, None

    def reset(self, **kwargs):
        observation, _ = super().reset(**kwargs)
        return self._written(observation), {"start": float(self.np_random.random())}

    def step(self, action):
        observation, reward, terminated, truncated, _ = super().step(action)
        self.info.clear()
        self.info.update(t=self.t, half=np.full(2, self.t / 2), nested={"t": self.t})
        if self.t % 3 == 0:
            self.info["third"] = f"at {self.t}"
        return self._written(observation), reward, terminated, truncated, self.info

    def _written(self, observation):
        if not isinstance(observation, np.ndarray):
            return observation
        self.array = observation.copy() if self.array is None else self.array
        self.array[:] = observation
        return self.array


def rollout(env, n_steps=40):
    """All that can be seen of an environment in some steps."""
    env.action_space.seed(0)
    env.seed(5)
    seen = [env.reset(), [dict(info) for info in env.reset_infos]]
    for _ in range(n_steps):
        step = env.step(np.array([env.action_space.sample() for _ in range(env.num_envs)]))
        seen += [*step, [dict(info) for info in env.reset_infos]]
    return seen


def without_clock(value):
    if isinstance(value, dict):
        return {key: without_clock(part) for key, part in value.items() if key != "t" or not isinstance(part, float)}
    return [without_clock(part) for part in value] if isinstance(value, list | tuple) else value


class Plain(Talkative):
    """A new array for each observation: SB3 keeps a terminal one by reference until all copies have stepped."""

    def _written(self, observation):
        return observation


def as_floats(value):
    """The same with numbers as arrays of float64: Gymnasium joins those of all copies in one array."""
    if isinstance(value, dict):
        return {key: as_floats(part) for key, part in value.items()}
    if isinstance(value, list):
        return [as_floats(part) for part in value]
    array = np.asarray(value)
    return array.astype(np.float64) if array.dtype.kind in "fiu" else array.astype(str)


class Asked(ToyEnv):
    """Remembers with what it was reset."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def reset(self, *, seed=None, options=None):
        self.asked.append((seed, options))
        return super().reset(seed=seed)


@contextmanager
def interrupted(env, delay):
    """Press Ctrl-C after some seconds, which the terminal sends to the workers as well."""

    def interrupt(*_):
        for process in env.processes:
            os.kill(process.pid, signal.SIGINT)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, delay)
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGALRM, before)


class Slow(Plain):
    def __init__(self, delay=0.01, **kwargs):
        super().__init__(**kwargs)
        self.delay = delay

    def step(self, action):
        time.sleep(self.delay)
        return super().step(action)


def add_to_attribute(env, name, number):
    """Change an attribute of an environment, and return both values."""
    before = env.get_wrapper_attr(name)
    env.set_wrapper_attr(name, before + number)
    return before, env.get_wrapper_attr(name)


def steps(env, n):
    for _ in range(n):
        env.step(np.zeros((env.num_envs, 2), np.float32))


def nothing_is_left():
    """No process and no shared memory outlives a test."""
    before = shared_memory()
    yield
    if mp.active_children():
        gc.collect()
    assert not mp.active_children()
    assert shared_memory() <= before


def shared_memory():
    """Names in the folder of shared memory. From Python 3.14 on, tqdm's lock is a semaphore with a name, which stays."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {name for name in names if sys.version_info < (3, 14) or not name.startswith("sem.")}
