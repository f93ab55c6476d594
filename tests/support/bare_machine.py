"""
A plugin of pytest for a machine with a GPU and without a package index: what it lacks cannot be imported, so that tests marked
`gpu` that need it are noticed here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

#: Packages of RL Zoo and of extras
LACKING = ("optuna", "rl_zoo3", "huggingface_hub", "moviepy", "rich", "tqdm", "seaborn", "tensorboard")


class _Refusing:
    """Finds none of them."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.split(".")[0] in LACKING:
            raise ModuleNotFoundError(f"No module named {name!r}, on a machine without a package index", name=name)
        return None


sys.meta_path.insert(0, _Refusing())
