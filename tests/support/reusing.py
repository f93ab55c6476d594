"""Environments that write into the memory that they were given, and into what they have returned; or else leave it alone."""

from copy import deepcopy

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from stable_baselines3.common.vec_env import VecEnv
from support.toys import BOX_ACTION, VECTOR

LENGTH = 5


def total(action):
    """Sum of all numbers of an action, weighted by their positions."""
    if isinstance(action, dict | tuple):
        return sum((k + 1) * total(part) for k, part in enumerate(action.values() if isinstance(action, dict) else action))
    numbers = np.asarray(action, np.float64).ravel()
    return float(numbers @ np.arange(1, len(numbers) + 1))


def spoil(action):
    """Write into an action, wherever that is possible."""
    for part in action.values() if isinstance(action, dict) else action if isinstance(action, tuple | list) else [action]:
        if isinstance(part, dict | tuple):
            spoil(part)
        elif isinstance(part, np.ndarray | th.Tensor):
            part[...] = 1


def write(target, source):
    """Write observations into those that were returned before."""
    if isinstance(target, dict):
        for key in target:
            write(target[key], source[key])
    else:
        target[...] = source


class Reusing(VecEnv):
    """
    Copies whose observations are drawn, and whose rewards depend on the action. Episodes end after five steps; those of odd
    copies are truncated.

    :param reuses: Whether observations, rewards, dones, infos, terminal observations and masks are always the same objects,
        and actions are overwritten
    """

    def __init__(self, reuses, observation_space=VECTOR, action_space=BOX_ACTION, n_envs=3):
        super().__init__(n_envs, deepcopy(observation_space), action_space)
        self.reuses, self.t, self.returns = reuses, 0, np.zeros(n_envs)
        self.observation_space.seed(0)
        self.own = self.masks = None
        # Statistics of the last episode of each copy
        self.episodes = [{} for _ in range(n_envs)]

    def observe(self):
        space, n = self.observation_space, self.num_envs
        if isinstance(space, spaces.Dict):
            return {key: np.stack([part.sample() for _ in range(n)]) for key, part in space.items()}
        return np.stack([space.sample() for _ in range(n)])

    def given(self, *result):
        """The result itself, or the objects of the first step with its content."""
        if not self.reuses:
            return result
        if self.own is None:
            self.own = deepcopy(result)
        for mine, new in zip(self.own[:-1], result[:-1], strict=True):
            write(mine, new)
        for mine, new, episode in zip(self.own[-1], result[-1], self.episodes, strict=True):
            mine.clear()
            episode.update(new.get("episode", {}))
            mine.update(new, **({"episode": episode} if "episode" in new else {}))
        return self.own

    def reset(self):
        n, self.t = self.num_envs, 0
        return self.given(self.observe(), np.zeros(n, np.float32), np.zeros(n, bool), [{} for _ in range(n)])[0]

    def step_async(self, actions):
        self.actions = actions
        assert all(self.action_space.contains(action) for action in actions), actions

    def step_wait(self):
        self.t += 1
        rewards = np.array([total(action) for action in self.actions], np.float32)
        if self.reuses:
            spoil(self.actions)
        self.returns += rewards
        done, infos = self.t % LENGTH == 0, [{} for _ in range(self.num_envs)]
        if done:
            last = self.observe()
            for index, info in enumerate(infos):
                info["TimeLimit.truncated"] = bool(index % 2)
                info["terminal_observation"] = (
                    {key: part[index] for key, part in last.items()} if isinstance(last, dict) else last[index]
                )
                info["episode"] = {"r": float(self.returns[index]), "l": LENGTH, "t": 0.0}
            self.returns[:] = 0
        return self.given(self.observe(), rewards, np.full(self.num_envs, done), infos)

    def action_masks(self):
        """Masks in one array, of which the first choice is always valid."""
        mask = np.ones((self.num_envs, int(self.action_space.n)), bool)
        mask[:, 1:] = (np.arange(1, mask.shape[1]) + self.t) % 2 == 0
        if self.masks is None or not self.reuses:
            self.masks = mask
        self.masks[:] = mask
        return list(self.masks)

    def close(self):
        pass

    def has_attr(self, attr_name):
        return attr_name == "action_masks"

    def get_attr(self, attr_name, indices=None):
        return [None] * self.num_envs

    def set_attr(self, attr_name, value, indices=None):
        pass

    def env_method(self, method_name, *method_args, indices=None, **method_kwargs):
        return getattr(self, method_name)()

    def env_is_wrapped(self, wrapper_class, indices=None):
        return [False] * self.num_envs


class ReusingEnv(gym.Env):
    """A single environment of the same kind, whose episodes are all truncated."""

    def __init__(self, reuses, observation_space=VECTOR, action_space=BOX_ACTION):
        self.reuses, self.observation_space, self.action_space = reuses, deepcopy(observation_space), action_space
        self.own, self.info = None, {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.t = 0
        return self.given(self.observation_space.sample()), self.told({})

    def given(self, observation):
        if not self.reuses:
            return observation
        if self.own is None or not isinstance(observation, np.ndarray | dict):
            self.own = deepcopy(observation)
        else:
            write(self.own, observation)
        return self.own

    def told(self, info):
        if not self.reuses:
            return info
        self.info.clear()
        self.info.update(info)
        return self.info

    def step(self, action):
        self.t += 1
        reward = total(action)
        if self.reuses:
            spoil(action)
        observation = self.given(self.observation_space.sample())
        return observation, reward, False, self.t == LENGTH, self.told({"t": self.t})


class ReusingVectorEnv(VectorEnv):
    """A vectorised environment of Gymnasium of the same kind."""

    def __init__(self, reuses, action_space=BOX_ACTION):
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.inner = Reusing(False, VECTOR, action_space)
        self.reuses, self.num_envs, self.own = reuses, 3, None
        self.single_observation_space, self.single_action_space = VECTOR, action_space
        self.observation_space = gym.vector.utils.batch_space(VECTOR, 3)
        self.action_space = gym.vector.utils.batch_space(action_space, 3)

    def reset(self, *, seed=None, options=None):
        return self.given(self.inner.reset()), {}

    def given(self, observations):
        if self.own is None:
            self.own = observations.copy(), np.zeros(3), np.zeros(3, bool), np.zeros(3, bool), {"final_obs": np.zeros((3, 3))}
        if not self.reuses:
            return observations
        self.own[0][:] = observations
        return self.own[0]

    def step(self, actions):
        self.inner.step_async(list(gym.vector.utils.iterate(self.action_space, actions)))
        observations, rewards, dones, infos = self.inner.step_wait()
        if self.reuses:
            spoil(actions)
        truncated = dones & (np.arange(3) % 2 == 1)
        final = np.stack([info.get("terminal_observation", np.zeros(3)) for info in infos])
        if not self.reuses:
            return observations, rewards, dones & ~truncated, truncated, {"final_obs": final} if dones.any() else {}
        own = self.own
        for mine, new in zip(own[:4], (observations, rewards, dones & ~truncated, truncated), strict=True):
            mine[:] = new
        own[4]["final_obs"][:] = final
        return own


class ReusingTorchEnv:
    """An environment in PyTorch of the same kind, whose tensors may have a graph of autograd."""

    num_envs, device, single_observation_space = 3, th.device("cpu"), VECTOR

    def __init__(self, reuses, action_space=BOX_ACTION, has_graph=False):
        self.reuses, self.single_action_space, self.has_graph, self.own, self.t = reuses, action_space, has_graph, None, 0
        self.generator = th.Generator()
        self.weight = th.ones((), requires_grad=has_graph)

    def observe(self):
        return 2 * th.rand(3, 3, generator=self.generator) - 1

    def given(self, *tensors):
        tensors = tuple(tensor * self.weight if tensor.is_floating_point() else tensor for tensor in tensors)
        if not self.reuses:
            return tensors
        if self.own is None:
            self.own = tuple(tensor.clone() for tensor in tensors)
        for mine, new in zip(self.own, tensors, strict=False):
            mine.copy_(new)
        return self.own[: len(tensors)]

    def reset(self, seed=None):
        self.generator.manual_seed(seed or 0)
        none = th.zeros(3, dtype=th.bool)
        return self.given(self.observe(), th.zeros(3), none, none, self.observe())[0], {}

    def step(self, actions):
        self.t += 1
        parts = actions.values() if isinstance(actions, dict) else [actions]
        rewards = sum(part.reshape(3, -1).float().sum(dim=1) * (k + 1) for k, part in enumerate(parts))
        if self.reuses:
            spoil(actions)
        ended = th.full((3,), self.t % LENGTH == 0)
        truncated = ended & (th.arange(3) % 2 == 1)
        *result, final = self.given(self.observe(), rewards, ended & ~truncated, truncated, self.observe())
        return *result, {"final_obs": final, "log": {"rewards": rewards.mean()}}
