"""
Metadata lives in ``setup.cfg``; this file adds what setuptools cannot declare: the start-up hook for RL Zoo, and the extension
module in C, which is left out where no compiler takes it.
"""

import ast
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

HOOK = Path(__file__).parent / "startup" / "zoo_hook.py"
PTH = "sb3_ppo_ext_zoo.pth"
MLP = Extension(
    "sb3_ppo_ext.engines.native._mlp",
    ["sb3_ppo_ext/engines/native/csrc/mlp.c"],
    depends=["sb3_ppo_ext/engines/native/csrc/kernels.h"],
    # Without errno and traps square roots and comparisons fit into vectors; NaN and infinity stay what they are.
    extra_compile_args=["-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"],
    optional=True,
)


def pth_line(source: str) -> str:
    """
    Python runs a line of a ``.pth`` file if it starts with ``import``. The source goes in as a whole, without its
    comments: a module of its own would cost three times as much wherever its bytecode is not cached. In a virtual
    environment the line runs twice.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            del node.body[0]
    return (
        "import os, sys; "
        "os.environ.get('SB3_PPO_EXT_AUTOREGISTER') == '0' "
        "or any(type(finder).__name__ == 'ZooWatcher' for finder in sys.meta_path) "
        f"or exec({ast.unparse(tree)!r}, {{'__name__': 'sb3_ppo_ext_zoo_hook'}})\n"
    )


class BuildWithStartupHook(build_py):
    """Write the ``.pth`` file to the root of the wheel: Python finds it there, and pip removes it again."""

    def run(self) -> None:
        super().run()
        root = Path(self._root_of_the_wheel())
        root.mkdir(parents=True, exist_ok=True)
        (root / PTH).write_text(pth_line(HOOK.read_text(encoding="utf-8")), encoding="utf-8")

    def _root_of_the_wheel(self) -> str:
        if self.editable_mode:
            # Files in `build_lib` stay out of an editable wheel, those of the install scheme go in.
            return str(self.get_finalized_command("install").install_lib)
        return str(self.build_lib)


if __name__ == "__main__":
    setup(cmdclass={"build_py": BuildWithStartupHook}, ext_modules=[MLP])
