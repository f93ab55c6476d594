"""Extends the Zoo's modules as they are imported, on behalf of the start-up hook, ``sb3_ppo_ext_zoo_hook``."""

import contextlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

from sb3_ppo_ext.zoo.registration import extend

_searching: set[str] = set()


def find_extended(fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
    """
    Find one of the Zoo's modules with the finders on ``sys.meta_path``, and have it extended after it has been executed.

    :param fullname: Name of the imported module
    :param path: ``__path__`` of its package
    :param target: Module that is reloaded, ``None`` for a first import
    :return: Spec that the finders find, ``None`` if there is none; also ``None`` for the start-up hook, which is one of the
        finders and calls this function again
    """
    if fullname in _searching:
        return None
    _searching.add(fullname)
    try:
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)
            spec = find_spec(fullname, path, target) if find_spec else None
            if spec is not None:
                _extend_after_loading(spec.loader)
                return spec
        return None
    finally:
        _searching.discard(fullname)


def _extend_after_loading(loader: Loader) -> None:
    """Wrap the ``exec_module`` of this loader, once. The loader stays the same object, which other tools expect."""

    def exec_and_extend(module: ModuleType) -> None:
        del loader.exec_module
        loader.exec_module(module)
        with contextlib.suppress(Exception):  # The Zoo must keep working; `python -m sb3_ppo_ext.zoo` shows what is wrong.
            extend(module)

    with contextlib.suppress(AttributeError):  # a loader with slots, or none
        loader.exec_module = exec_and_extend  # type: ignore[method-assign]
