"""
Small partially observable tasks. Not a script.

A policy that sees only the current observation gets a return of about 0; the best return is 1.
"""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class TMaze(gym.Env):
    """
    A cue at the start tells which way to turn at the end of a corridor: 1 for right, -1 for left. A step in
    the corridor that does not go forward costs 0.1.

    :param length: Length of the corridor, that is, the number of steps between cue and choice
    """

    action_space = spaces.Discrete(3)  # forward, left, right
    # The cue, in the first step only, and whether this is the end of the corridor
    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, length: int = 10):
        self.length = length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.cue, self.position, self.n_steps = int(self.np_random.choice([-1, 1])), 0, 0
        return np.array([self.cue, self.length == 0], np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.n_steps += 1
        is_choice, goes_on = self.position == self.length, action == 0
        reward = -0.1 if goes_on == is_choice else 0.0
        chooses = is_choice and not goes_on
        if chooses:
            reward = 1.0 if (action == 2) == (self.cue > 0) else -1.0
        self.position += int(goes_on and not is_choice)
        observation = np.array([0.0, self.position == self.length], np.float32)
        return observation, reward, chooses, not chooses and self.n_steps >= 2 * self.length + 2, {}


class RepeatPrevious(gym.Env):
    """
    One of four symbols is shown at each step, and the agent has to name the symbol of some steps ago, as in RepeatPrevious of
    POPGym (https://arxiv.org/abs/2303.01859). An episode with all answers right has the return 1.

    :param delay: Number of steps between a symbol and its answer
    :param n_answers: Number of answers in an episode
    """

    action_space = spaces.Discrete(4)
    # One-hot, because VecFrameStack does not stack Discrete observations
    observation_space = spaces.Box(0.0, 1.0, (4,), np.float32)

    def __init__(self, delay: int = 4, n_answers: int = 32):
        self.delay, self.n_answers = delay, n_answers

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.symbols = self.np_random.integers(4, size=self.delay + self.n_answers + 1)
        self.n_steps = 0
        return self._observe(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        reward = 0.0
        if self.n_steps >= self.delay:
            # One in four random answers is right: the expected return is 0.
            reward = (1.0 if action == self.symbols[self.n_steps - self.delay] else -1 / 3) / self.n_answers
        self.n_steps += 1
        return self._observe(), reward, self.n_steps == self.delay + self.n_answers, False, {}

    def _observe(self) -> np.ndarray:
        return np.eye(4, dtype=np.float32)[self.symbols[self.n_steps]]
