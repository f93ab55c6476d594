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

    def __init__(self) -> None:
        self.searching: set[str] = set()

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        if fullname not in ZOO_MODULES or fullname in self.searching:
            return None
        # Asked while asking the others, by one of them: they get the answer of the rest.
        self.searching.add(fullname)
        try:
            for finder in sys.meta_path:
                find_spec = getattr(finder, "find_spec", None)
                spec = find_spec(fullname, path, target) if find_spec else None
                if spec is not None:
                    extend_after_loading(spec.loader)
                    return spec
            return None
        finally:
            self.searching.discard(fullname)


def extend_after_loading(loader: "Loader") -> None:
    """Wrap the ``exec_module`` of this one loader, once; the loader stays what other tools expect to find."""

    def exec_and_extend(module: "ModuleType") -> None:
        del loader.exec_module
        loader.exec_module(module)
        try:
            from sb3_ppo_ext.zoo import extend

            extend(module)
        except Exception:
            # The Zoo must go on working; `python -m sb3_ppo_ext.zoo` shows what is wrong.
            pass

    try:  # noqa: SIM105  # contextlib would have to be imported
        loader.exec_module = exec_and_extend  # type: ignore[method-assign]
    except AttributeError:
        pass  # a loader with slots, or none


sys.meta_path.insert(0, ZooWatcher())
