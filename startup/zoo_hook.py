"""
Make RL Zoo know ``ppo_ext`` as soon as it is imported, in every interpreter of this environment.

RL Zoo has no plugin mechanism, so `setup.py` writes this source into a ``.pth`` file, which Python runs at start-up
unless ``SB3_PPO_EXT_AUTOREGISTER=0`` is in the environment. It must stay cheap: it imports nothing new, and only
watches for the Zoo's modules that ``sb3_ppo_ext.zoo`` extends.
"""

import sys

TYPE_CHECKING = False  # typing's own would have to be imported
if TYPE_CHECKING:
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType

ZOO_MODULES = ("rl_zoo3.utils", "rl_zoo3.hyperparams_opt", "rl_zoo3.exp_manager")


class ZooWatcher:
    """Meta path finder that lets the other finders find the Zoo's modules, and extends each once it has run."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        if fullname not in ZOO_MODULES:
            return None
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)
            spec = find_spec(fullname, path, target) if find_spec and finder is not self else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    extend_after_loading(spec.loader)
                return spec
        return None


def extend_after_loading(loader: "Loader") -> None:
    """Wrap the ``exec_module`` of this one loader; the loader itself stays what other tools expect to find."""
    exec_module = loader.exec_module

    def exec_and_extend(module: "ModuleType") -> None:
        exec_module(module)
        try:
            from sb3_ppo_ext.zoo import extend

            extend(module)
        except Exception:
            # The Zoo must go on working; `python -m sb3_ppo_ext.zoo` shows what is wrong.
            pass

    loader.exec_module = exec_and_extend  # type: ignore[method-assign]


sys.meta_path.insert(0, ZooWatcher())
