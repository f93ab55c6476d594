"""A Gymnasium wrapper that turns strings in observations into numbers."""

from __future__ import annotations

import re
import zlib
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from sb3_ppo_ext.common.type_aliases import Arrays
from sb3_ppo_ext.common.validation import check_number, is_text, refuse


class EncodeText(gym.ObservationWrapper[Any, Any, Any], gym.utils.RecordConstructorArgs):
    """
    Turns each string of an observation, such as the mission of MiniGrid, into numbers that a policy can read. The word at each
    place of the string sets one of ``n_codes`` numbers to 1, and the others of this place stay 0. Which one it is depends on
    the word alone, by a checksum, so that no vocabulary is needed; two words can share a code.

    It is for observations that are strings, or dictionaries with strings.

    :param env: Environment of Gymnasium
    :param n_words: Number of words that are encoded, at least 1; those that follow are left out. Punctuation marks count as
        words, and upper case as lower case
    :param n_codes: Number of codes, at least 1
    :raises ValueError: if no part of the observations is a string
    """

    def __init__(self, env: gym.Env, n_words: int = 32, n_codes: int = 64):
        gym.utils.RecordConstructorArgs.__init__(self, n_words=n_words, n_codes=n_codes)
        super().__init__(env)
        check_number("n_words", n_words, 1, integer=True)
        check_number("n_codes", n_codes, 1, integer=True)
        self.n_words, self.n_codes = n_words, n_codes
        space, encoded = env.observation_space, spaces.Box(0, 1, (n_words * n_codes,), np.uint8)
        self._keys = text_keys(space)
        if not self._keys:
            refuse("env", env, f"no part of its observations is a string, but {space}; leave the wrapper out")
        self.observation_space = encoded
        if isinstance(space, spaces.Dict):
            self.observation_space = spaces.Dict({**space.spaces, **dict.fromkeys(self._keys, encoded)})

    def observation(self, observation: Arrays) -> Any:
        """
        :param observation: Observation of the environment
        :return: The same observation with numbers instead of strings
        """
        if isinstance(observation, str):
            return self._encoded(observation)
        return {**observation, **{key: self._encoded(observation[key]) for key in self._keys}}

    def _encoded(self, text: str) -> np.ndarray:
        codes = np.zeros((self.n_words, self.n_codes), np.uint8)
        for place, word in enumerate(re.findall(r"\w+|[^\w\s]", text.lower())[: self.n_words]):
            codes[place, zlib.crc32(word.encode()) % self.n_codes] = 1
        return codes.reshape(-1)


def text_keys(space: spaces.Space) -> list[Any]:
    """
    :param space: Observation space
    :return: Keys of the strings in it, ``[None]`` for a string that is no part of a dictionary
    """
    parts = space.spaces if isinstance(space, spaces.Dict) else {None: space}
    return [key for key, part in parts.items() if is_text(part)]
