"""
Small environments in PyTorch that keep the contracts of simulators that need a GPU.

Each copy is a clock: observations are the steps since its last reset, rewards count all steps, and the copies end at different
times. What each of the classes does in the way of its simulator is in its docstring.
"""

from types import SimpleNamespace
from typing import ClassVar

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces

CLOCK = spaces.Box(0, np.inf, (2,), np.float32)
PUSH = spaces.Box(-1, 1, (1,), np.float32)


class Clocks:
    """Copy ``i`` terminates after ``3 + i`` steps, unless that is later than its limit of 5 steps."""

    def __init__(self, num_envs=4):
        self.num_envs, self.device = num_envs, th.device("cpu")
        self.time = th.zeros(num_envs, dtype=th.int64)
        self.n_steps = 0

    def move(self):
        """Whether the copies terminate, and whether they run out of time, after another step."""
        self.n_steps += 1
        self.time += 1
        terminated = self.time == 3 + th.arange(self.num_envs)
        return terminated, (self.time >= 5) & ~terminated

    def observe(self):
        """New tensor of shape ``(num_envs, 2)``: the clocks twice."""
        return self.time.to(th.float32).reshape(-1, 1).repeat(1, 2)


class LikeManiSkill(Clocks):
    """
    As ``ManiSkillVectorEnv``: in a step in which an episode ends, the infos are those of the reset, with the observations
    before it as ``final_observation``, their infos as ``final_info``, and masks beside both. Metrics are in ``episode``.
    """

    single_observation_space, single_action_space = CLOCK, PUSH
    auto_reset, metadata = True, {}

    def reset(self, *, seed=None, options=None):
        self.seed = seed
        self.time[(options or {}).get("env_idx", slice(None))] = 0
        return self.observe(), {"reconfigure": False}

    def step(self, actions):
        terminated, truncated = self.move()
        observations, rewards = self.observe(), th.full((self.num_envs,), float(self.n_steps))
        infos = {"success": terminated, "elapsed_steps": self.time.clone(), "episode": {"success_once": terminated.clone()}}
        dones = terminated | truncated
        if dones.any():
            final, final_info = observations.clone(), infos
            observations, infos = self.reset(options={"env_idx": th.arange(self.num_envs)[dones]})
            infos |= {"final_observation": final, "_final_observation": dones, "final_info": final_info, "_final_info": dones}
        return observations, rewards, terminated, truncated, infos


class _IsaacTask(Clocks):
    metadata: ClassVar = {"render_modes": []}
    render_mode = None

    def __init__(self, num_envs, compute_final_obs, is_finite_horizon):
        super().__init__(num_envs)
        self.cfg = SimpleNamespace(compute_final_obs=compute_final_obs, is_finite_horizon=is_finite_horizon)
        self.single_observation_space = spaces.Dict({"policy": CLOCK, "critic": CLOCK})
        self.single_action_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.extras = {}
        self.reward_buf = th.zeros(num_envs)
        self.reset_terminated, self.reset_time_outs = th.zeros(2, num_envs, dtype=th.bool)
        self.obs_buf = {"policy": th.zeros(num_envs, 2), "critic": th.zeros(num_envs, 2)}

    def groups(self):
        return {"policy": self.observe(), "critic": -self.observe()}

    def write_observations(self):
        for key, values in self.groups().items():
            self.obs_buf[key].copy_(values)


class LikeIsaacLab(gym.Env):
    """
    As an environment of Isaac Lab in a wrapper of Gymnasium, which hides its attributes: observations are a dictionary of
    groups. All tensors are written in place by the next step, and the extras are one dictionary, so that the observations
    before a reset stay in ``final_obs``. The log is one of scalars, written when an episode ends. The actions have no bounds.
    """

    def __init__(self, num_envs=4, compute_final_obs=True, is_finite_horizon=False):
        self.task = _IsaacTask(num_envs, compute_final_obs, is_finite_horizon)

    @property
    def unwrapped(self):
        return self.task

    def reset(self, *, seed=None, options=None):
        self.task.time.zero_()
        self.task.write_observations()
        return self.task.obs_buf, self.task.extras

    def step(self, actions):
        task = self.task
        terminated, truncated = task.move()
        task.reset_terminated.copy_(terminated)
        task.reset_time_outs.copy_(truncated)
        task.reward_buf.fill_(float(task.n_steps))
        ended = terminated | truncated
        if ended.any():
            if task.cfg.compute_final_obs:
                task.extras["final_obs"] = task.groups()
            task.extras["log"] = {"Episode_Reward/clock": task.time[ended].float().mean(), "Curriculum/level": 0.5}
            task.time[ended] = 0
        task.write_observations()
        return task.obs_buf, task.reward_buf, task.reset_terminated, task.reset_time_outs, task.extras


class LikeRslRl(Clocks):
    """
    As the ``VecEnv`` of rsl_rl: no spaces, no ``reset``, ends of episodes as integers, and those that were cut off as floats
    in ``extras["time_outs"]``, which are written only when an episode ends, and stay there.
    """

    num_actions = 1

    def __init__(self, num_envs=4):
        super().__init__(num_envs)
        self.extras = {}

    def get_observations(self):
        return self.observe()

    def step(self, actions):
        terminated, truncated = self.move()
        dones = terminated | truncated
        if dones.any():
            self.extras["time_outs"] = truncated.float()
            self.time[dones] = 0
        return self.observe(), th.full((self.num_envs,), float(self.n_steps)), dones.long(), self.extras


class LikeLists(Clocks):
    """
    Infos are a list with a dictionary for each copy, with SB3's keys at the end of an episode, or with Gymnasium's if there
    are five results. Without an end, the list is empty if ``is_short``.
    """

    single_observation_space, single_action_space = CLOCK, PUSH

    def __init__(self, num_envs=4, n_results=4, is_short=False):
        super().__init__(num_envs)
        self.n_results, self.is_short = n_results, is_short

    def reset(self):
        self.time.zero_()
        return self.observe()

    def step(self, actions):
        terminated, truncated = self.move()
        dones, last = terminated | truncated, self.observe()
        of_end = self._of_end_sb3 if self.n_results == 4 else self._of_end_gymnasium
        infos = [of_end(last[i], truncated[i]) if dones[i] else {} for i in range(self.num_envs)]
        if self.is_short and not dones.any():
            infos = []
        self.time[dones] = 0
        ends = (dones,) if self.n_results == 4 else (terminated, truncated)
        return self.observe(), th.full((self.num_envs,), float(self.n_steps)), *ends, infos

    def _of_end_sb3(self, last, cut_off):
        return {"terminal_observation": last.numpy(), "TimeLimit.truncated": bool(cut_off)}

    def _of_end_gymnasium(self, last, cut_off):
        return {"final_obs": last}


class Box:
    """A space of mjlab, whose classes are its own."""

    def __init__(self, shape, low, high):
        self.shape, self.low, self.high = shape, low, high


class Dict:
    """As :class:`Box`"""

    def __init__(self, **spaces):
        self.spaces = spaces


class LikeMjlab(Clocks):
    """
    As ``ManagerBasedRlEnv`` of mjlab: the calls and results of Isaac Lab without Gymnasium's classes, groups of observations
    for actor and critic, and no last observations.
    """

    metadata: ClassVar = {"render_modes": [None, "rgb_array"]}

    def __init__(self, num_envs=4, auto_reset=True):
        super().__init__(num_envs)
        self.cfg = SimpleNamespace(is_finite_horizon=False, auto_reset=auto_reset)
        part = Box((2,), -float("inf"), float("inf"))
        self.single_observation_space = Dict(actor=part, critic=part)
        self.single_action_space = Box((1,), -float("inf"), float("inf"))
        self.extras = {}

    @property
    def unwrapped(self):
        return self

    def groups(self):
        return {"actor": self.observe(), "critic": -self.observe()}

    def reset(self, *, seed=None, env_ids=None, options=None):
        self.time[slice(None) if env_ids is None else env_ids] = 0
        return self.groups(), self.extras

    def step(self, action):
        terminated, truncated = self.move()
        ended = terminated | truncated
        if ended.any():
            self.extras["log"] = {"Episode_Reward/clock": self.time[ended].float().mean()}
            self.time[ended] = 0
        return self.groups(), th.full((self.num_envs,), float(self.n_steps)), terminated, truncated, self.extras
