"""
Small partially observable tasks. Not a script.

No return is above 1. In T-maze, RepeatPrevious and Counting, guessing has the return 0.
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


class Counting(gym.Env):
    """
    A pulse comes with a probability of a quarter at each step, and the agent has to name the number of pulses since the start,
    from 0 to 7 or more, at each step.
    """

    action_space = spaces.Discrete(8)
    observation_space = spaces.Box(0.0, 1.0, (2,), np.float32)  # pulse, no pulse
    n_steps = 24

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.pulses, self.now = self.np_random.random(self.n_steps + 1) < 0.25, 0
        return self._observe(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        count = min(int(self.pulses[: self.now + 1].sum()), 7)
        self.now += 1
        reward = (1.0 if action == count else -1 / 7) / self.n_steps
        return self._observe(), reward, self.now == self.n_steps, False, {}

    def _observe(self) -> np.ndarray:
        return np.eye(2, dtype=np.float32)[0 if self.pulses[self.now] else 1]


class Bandit(gym.Env):
    """
    A bandit with four arms, whose probabilities to win are drawn from [0, 1] in each episode. The observation is the last
    action and its reward. The return is the fraction of wins: 0.5 by chance, 0.8 for who knows the best arm.
    """

    action_space = spaces.Discrete(4)
    observation_space = spaces.Box(0.0, 1.0, (6,), np.float32)  # last action (one-hot), its reward, whether the episode begins
    n_steps = 50

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.probabilities, self.now = self.np_random.random(4), 0
        return np.eye(6, dtype=np.float32)[5], {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        wins = bool(self.np_random.random() < self.probabilities[action])
        self.now += 1
        observation = np.eye(6, dtype=np.float32)[action]
        observation[4] = wins
        return observation, wins / self.n_steps, self.now == self.n_steps, False, {}


class HigherLower(gym.Env):
    """
    The cards of a deck are shown one after the other, and the agent bets on whether the next one is higher or lower, as in
    HigherLower of POPGym (https://arxiv.org/abs/2303.01859). Who remembers the cards that are gone bets better.
    """

    action_space = spaces.Discrete(2)  # lower, higher
    observation_space = spaces.Box(0.0, 1.0, (13,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.deck, self.now = self.np_random.permutation(52) // 4, 0
        return self._observe(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        rise = int(self.deck[self.now + 1] - self.deck[self.now])
        self.now += 1
        reward = 0.0 if rise == 0 else 1.0 if (rise > 0) == (action == 1) else -1.0
        return self._observe(), reward / 51, self.now == 51, False, {}

    def _observe(self) -> np.ndarray:
        return np.eye(13, dtype=np.float32)[self.deck[self.now]]


class PartOfObservation(gym.ObservationWrapper):
    """
    :param env: Environment with a vector as observation
    :param indices: Indices of the numbers that the agent sees
    :param noise: Standard deviation of the noise that is added to them
    """

    def __init__(self, env: gym.Env, indices: list[int], noise: float = 0.0):
        super().__init__(env)
        self.indices, self.noise = indices, noise
        self.observation_space = spaces.Box(-np.inf, np.inf, (len(indices),), np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        noise = self.noise * self.np_random.standard_normal(len(self.indices))
        return (observation[self.indices] + noise).astype(np.float32)


class Delay(gym.Wrapper):
    """
    :param env: Environment
    :param n_steps: Number of steps after which the agent sees an observation
    """

    def __init__(self, env: gym.Env, n_steps: int):
        super().__init__(env)
        self.n_steps = n_steps

    def reset(self, **kwargs: Any) -> tuple[Any, dict]:
        observation, info = self.env.reset(**kwargs)
        self.waiting = [observation] * (self.n_steps + 1)
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        observation, *others = self.env.step(action)
        self.waiting = [*self.waiting[1:], observation]
        return (self.waiting[0], *others)


def noisy_cart_pole() -> gym.Env:
    """Cart and pole whose positions are seen with noise, and whose velocities are not seen."""
    env = PartOfObservation(gym.make("CartPole-v1", max_episode_steps=200), [0, 2], noise=0.1)
    return gym.wrappers.TransformReward(env, lambda reward: float(reward) / 200)


def pendulum_positions() -> gym.Env:
    """A pendulum whose velocity is not seen. A pendulum that hangs down has a return of about 0."""
    return _scaled_pendulum(PartOfObservation(gym.make("Pendulum-v1"), [0, 1]))


def delayed_pendulum() -> gym.Env:
    """A pendulum that is seen four steps later."""
    return _scaled_pendulum(Delay(gym.make("Pendulum-v1"), 4))


def _scaled_pendulum(env: gym.Env) -> gym.Env:
    return gym.wrappers.TransformReward(env, lambda reward: float(reward) / 1600 + 1 / 200)
