"""``--vec-env envpool``: RL Zoo's parser knows only ``dummy`` and ``subproc``, so that it is shown the former."""

from __future__ import annotations

import sys
from contextvars import ContextVar

from sb3_ppo_ext.envs.envpool_vec_env import ENVPOOL

# Whether the environments of this command are those of EnvPool
IS_CHOSEN: ContextVar[bool] = ContextVar("is_envpool_chosen", default=False)


def take_envpool_option() -> None:
    """Remember ``--vec-env envpool`` of this command, which a command that follows in the same process does not have."""
    words = sys.argv
    found = [place for place, word in enumerate(words) if word == ENVPOOL and words[place - 1] == "--vec-env"]
    joined = [place for place, word in enumerate(words) if word == f"--vec-env={ENVPOOL}"]
    for place in found:
        words[place] = "dummy"
    for place in joined:
        words[place] = "--vec-env=dummy"
    if found or joined:
        IS_CHOSEN.set(True)
