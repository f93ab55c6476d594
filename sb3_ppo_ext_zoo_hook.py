"""
Registers ``ppo_ext`` in RL Zoo as soon as the Zoo is imported, in every interpreter of this environment.

RL Zoo has no plugin mechanism. Therefore the installation puts ``sb3_ppo_ext_zoo.pth`` into ``site-packages``, one line that
Python runs at start-up: it calls :func:`install`, unless ``SB3_PPO_EXT_AUTOREGISTER=0`` is set in the environment. This module
must stay cheap: it imports only what Python has imported at start-up anyway; the rest (with PyTorch) is imported together with
the Zoo's modules.
"""

import sys

TYPE_CHECKING = False  # typing's own would require an import
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

ZOO_MODULES = ("rl_zoo3.utils", "rl_zoo3.hyperparams_opt", "rl_zoo3.exp_manager")


def install() -> None:
    """Watch for the Zoo's modules. Calling it again changes nothing: in some environments Python runs the line twice."""
    if ZooWatcher not in sys.meta_path:
        sys.meta_path.insert(0, ZooWatcher)


class ZooWatcher:
    """Meta path finder that lets :mod:`sb3_ppo_ext.zoo.import_hook` find the Zoo's modules, and finds no others."""

    @staticmethod
    def find_spec(
        fullname: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if fullname in ZOO_MODULES:
            try:
                from sb3_ppo_ext.zoo.import_hook import find_extended
            except Exception:
                return None  # The Zoo must keep working; `python -m sb3_ppo_ext.zoo` shows what is wrong.
            return find_extended(fullname, path, target)
        return None
