"""Environments with any spaces, which misbehave on request. The same arguments give the same episodes."""

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecCheckNan, VecFrameStack, VecMonitor, VecNormalize
from support.reusing import spoil, write

from sb3_ppo_ext import FastDummyVecEnv, VectorEnvAdapter
from sb3_ppo_ext.common.action_masks import choices_of

REWARDS = {
    "plain": lambda t: 0.1 * t - 0.2,
    "zero": lambda t: 0,
    "large": lambda t: 1e6 * (-1) ** t,
    "huge": lambda t: 1e30,
    "numpy": lambda t: np.float32(0.1 * t),
    "array": lambda t: np.array(0.1 * t),
    "bool": lambda t: t % 2 == 0,
    "nan": lambda t: float("nan") if t == 3 else 0.1,
    "infinite": lambda t: float("inf") if t == 3 else 0.1,
}
INFOS = {
    "none": lambda t: {},
    "success": lambda t: {"is_success": t % 2 == 0},
    "rubbish": lambda t: {"is_success": None, "TimeLimit.truncated": "maybe", "x": object()},
}


def contains(space, action):
    """Whether an action is in a space, up to its dtype: SB3 gives an environment float32 for any ``Box``."""
    if isinstance(space, spaces.Dict):
        return action.keys() == space.spaces.keys() and all(contains(space[key], part) for key, part in action.items())
    if isinstance(space, spaces.Tuple):
        return len(action) == len(space) and all(map(contains, space, action))
    if isinstance(space, spaces.Box):
        return action.shape == space.shape and bool(np.all((space.low <= action) & (action <= space.high)))
    return space.contains(action)


class FuzzedEnv(gym.Env):
    """
    Observations are samples of the space, whatever the action.

    :param observation_space: Observation space
    :param action_space: Action space; other actions fail
    :param length: Number of steps after which an episode is truncated
    :param p_end: Probability that a step terminates the episode
    :param rewards: Key of ``REWARDS``
    :param infos: Key of ``INFOS``
    :param nan_at: Step of the episode with a NaN in its observation, ``None`` for none
    :param reuses: Whether all observations are in one memory, all infos in one dictionary, and actions are overwritten
    """

    def __init__(
        self,
        observation_space,
        action_space,
        length=5,
        p_end=0.1,
        rewards="plain",
        infos="none",
        nan_at=None,
        reuses=False,
        seed=0,
    ):
        self.reuses, self.own, self.info = reuses, None, {}
        self.observation_space, self.action_space = observation_space, action_space
        self.length, self.p_end, self.nan_at, self.rewards, self.infos = length, p_end, nan_at, rewards, infos
        # Valid choices of each action, if somebody has asked for them since the last step
        self.masks = None
        super().reset(seed=seed)
        observation_space.seed(seed)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._observe(), self._told({})

    def step(self, action):
        assert contains(self.action_space, action), f"{action!r} is not in {self.action_space}"
        if self.masks is not None:
            chosen = zip(self.masks, np.ravel(action), strict=True)
            assert all(mask[choice] for mask, choice in chosen), f"{action!r} is not valid: {self.masks}"
        self.t, self.masks = self.t + 1, None
        terminated = bool(self.np_random.random() < self.p_end)
        reward, info = REWARDS[self.rewards](self.t), INFOS[self.infos](self.t)
        if self.reuses:
            spoil(action)
        return self._observe(), reward, terminated, self.t >= self.length, self._told(info)

    def _told(self, info):
        if not self.reuses:
            return info
        self.info.clear()
        self.info.update(info)
        return self.info

    def action_masks(self):
        """The first choice of each action is always valid, others not in each step."""
        choices = choices_of(self.action_space)
        self.masks = [[choice == 0 or (choice + self.t) % 3 != 1 for choice in range(n)] for n in choices]
        return np.concatenate(self.masks)

    def _observe(self):
        observation = self.observation_space.sample()
        if self.t == self.nan_at and isinstance(observation, np.ndarray) and observation.dtype.kind == "f":
            observation.flat[0] = np.nan
        if not self.reuses or not isinstance(observation, np.ndarray):
            return observation
        self.own = observation if self.own is None else self.own
        write(self.own, observation)
        return self.own


def _vectorised(make, n_envs, kind):
    functions = [lambda i=i: make(i) for i in range(n_envs)]
    return {
        "gym": lambda: functions[0](),
        "dummy": lambda: DummyVecEnv([lambda f=f: Monitor(f()) for f in functions]),
        "bare": lambda: DummyVecEnv(functions),
        "fast": lambda: FastDummyVecEnv([lambda f=f: Monitor(f()) for f in functions]),
        "vector": lambda: SyncVectorEnv(functions),
        "adapter": lambda: VecMonitor(VectorEnvAdapter(SyncVectorEnv(functions))),
        "same step": lambda: VectorEnvAdapter(SyncVectorEnv(functions, autoreset_mode=AutoresetMode.SAME_STEP)),
    }[kind]()


WRAPPERS = {
    "normalize": lambda env: VecNormalize(env),
    "normalize reward": lambda env: VecNormalize(env, norm_obs=False),
    "stack": lambda env: VecFrameStack(env, 2),
    "monitor": VecMonitor,
    "check": lambda env: VecCheckNan(env, raise_exception=False),
}
KINDS = ("gym", "dummy", "bare", "fast", "vector", "adapter", "same step")


def make_env(observation_space, action_space, n_envs=2, kind="dummy", wrappers=(), **behaviour):
    """
    :param n_envs: Number of environments, 1 if the kind is ``"gym"``
    :param kind: One of ``KINDS``: how they are vectorised
    :param wrappers: Keys of ``WRAPPERS``, from the innermost to the outermost
    :param behaviour: Arguments of :class:`FuzzedEnv`
    """

    def make(index):
        return FuzzedEnv(observation_space, action_space, seed=index, **behaviour)

    env = _vectorised(make, n_envs, kind)
    for name in wrappers:
        env = WRAPPERS[name](env)
    return env
