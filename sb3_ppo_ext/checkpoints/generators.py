"""The global random number generators of Python, NumPy and torch."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch as th

from sb3_ppo_ext.common.type_aliases import StateDict


def generator_states() -> dict[str, object]:
    """:return: States of the global generators, those of CUDA where it is in use"""
    states: dict[str, object] = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": th.get_rng_state()}
    if th.cuda.is_available() and th.cuda.is_initialized():
        states["cuda"] = th.cuda.get_rng_state_all()
    return states


def set_generator_states(states: StateDict) -> None:
    """
    :param states: States from :func:`generator_states`. Those of CUDA are set on as many devices as there are
    """
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    th.set_rng_state(states["torch"])
    if th.cuda.is_available():
        for device, state in zip(range(th.cuda.device_count()), states.get("cuda", ()), strict=False):
            th.cuda.set_rng_state(state, device)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Give the global generators the states that they had before, at the end of the ``with`` statement."""
    states = generator_states()
    try:
        yield
    finally:
        set_generator_states(states)
