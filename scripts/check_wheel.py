"""
What a wheel of this package can do where it is installed without its dependencies: its C modules are there and compute.

cibuildwheel runs it on each platform (``pyproject.toml``), also where PyTorch has no wheels. It loads the modules from their
files, because the package itself needs PyTorch. Windows has no modules.
"""

import importlib.util
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

MODULES = ("engines.native._mlp", "envs.parallel._flags", "distributed._shared_sum", "memory._scan")


def load(name: str) -> ModuleType:
    """
    :param name: Name of a module in the package
    :return: The module, without its package
    """
    *folders, stem = name.split(".")
    path = Path(sysconfig.get_path("platlib"), "sb3_ppo_ext", *folders, stem + sysconfig.get_config_var("EXT_SUFFIX"))
    spec = importlib.util.spec_from_file_location(stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    if sys.platform == "win32":
        print("no C modules on Windows")
        return
    modules = {name: load(name) for name in MODULES}
    print(f"{', '.join(modules)} are there; kernels: {', '.join(modules[MODULES[0]].available())}")


if __name__ == "__main__":
    main()
