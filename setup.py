"""
Metadata lives in ``setup.cfg``; this file adds what cannot be declared there: the start-up hook for RL Zoo, and the extension
modules in C, which are left out where they do not compile.
"""

import py_compile
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

HOOK = Path(__file__).parent / "sb3_ppo_ext_zoo_hook.py"
PTH = "sb3_ppo_ext_zoo.pth"
# Python runs a line of a `.pth` file if it begins with `import`. If the checkout of an editable install has been deleted, the
# module is missing too, and without the `except` Python would report an error at every start.
PTH_LINE = (
    "import os; os.environ.get('SB3_PPO_EXT_AUTOREGISTER') == '0' or "
    r"exec('try: import sb3_ppo_ext_zoo_hook as hook; hook.install()\nexcept ImportError: pass')"
    "\n"
)
MLP = Extension(
    "sb3_ppo_ext.engines.native._mlp",
    ["sb3_ppo_ext/engines/native/csrc/mlp.c"],
    depends=[f"sb3_ppo_ext/engines/native/csrc/{name}.h" for name in ("kernels", "pool")],
    # Without errno and traps, square roots and comparisons can be vectorized; NaN and infinity are still respected.
    extra_compile_args=["-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-pthread"],
    extra_link_args=["-pthread"],
    optional=True,
)
# For POSIX; elsewhere it does not compile, and torch adds up instead.
SHARED_SUM = Extension(
    "sb3_ppo_ext.distributed._shared_sum",
    ["sb3_ppo_ext/distributed/csrc/shared_sum.c"],
    depends=["sb3_ppo_ext/common/csrc/waiting.h"],
    extra_compile_args=["-O3", "-std=c11", "-D_POSIX_C_SOURCE=200809L"],
    optional=True,
)
FLAGS = Extension(
    "sb3_ppo_ext.rollout.parallel._flags",
    ["sb3_ppo_ext/rollout/parallel/csrc/flags.c"],
    depends=["sb3_ppo_ext/common/csrc/waiting.h"],
    extra_compile_args=["-O3"],
    optional=True,
)


class BuildWithStartupHook(build_py):
    """Write the ``.pth`` file to the root of the wheel: Python finds it there, and pip removes it again."""

    def run(self) -> None:
        super().run()
        root = Path(self._root_of_the_wheel())
        root.mkdir(parents=True, exist_ok=True)
        (root / PTH).write_text(PTH_LINE, encoding="utf-8")
        if self.editable_mode:
            # As pip does for a wheel: where Python may not write bytecode, compiling would take most of the time at start-up.
            py_compile.compile(str(HOOK))

    def _root_of_the_wheel(self) -> str:
        if self.editable_mode:
            # An editable wheel contains the files of the install scheme, not those in `build_lib`.
            install: Any = self.get_finalized_command("install")
            return str(install.install_lib)
        return str(self.build_lib)


if __name__ == "__main__":
    setup(cmdclass={"build_py": BuildWithStartupHook}, ext_modules=[MLP, SHARED_SUM, FLAGS])
