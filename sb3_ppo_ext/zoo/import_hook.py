"""Extends the Zoo's modules as they are imported. The start-up hook, ``sb3_ppo_ext_zoo_hook``, asks for it."""

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
    Let the finders on ``sys.meta_path`` find one of the Zoo's modules, and have it extended once it has run.

    :param fullname: Name of the module that is imported
    :param path: The ``__path__`` of its package
    :param target: Module that is reloaded, if any
    :return: What the finders find; ``None`` for the start-up hook, which is one of them and asks again
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
    """Wrap the ``exec_module`` of this one loader, once. The loader stays the object that other tools expect to find."""

    def exec_and_extend(module: ModuleType) -> None:
        del loader.exec_module
        loader.exec_module(module)
        with contextlib.suppress(Exception):  # The Zoo must go on working; `python -m sb3_ppo_ext.zoo` shows what is wrong.
            extend(module)

    with contextlib.suppress(AttributeError):  # a loader with slots, or none
        loader.exec_module = exec_and_extend  # type: ignore[method-assign]
