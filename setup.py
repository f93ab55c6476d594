"""
Metadata lives in ``setup.cfg``; this file adds what cannot be declared there: the start-up hook for RL Zoo, the extension
modules in C, which are left out where they do not compile, and the address of the repository that a release is built in.

Environment variables:

- ``SB3_PPO_EXT_URL``: address of the repository on GitHub. The metadata then name it, and the links of the README are
  absolute, so that they work on an index.
- ``SB3_PPO_EXT_REQUIRE_EXTENSIONS=1``: an extension module that does not compile is an error (for wheels). Windows has none.
"""

import os
import py_compile
import re
import sys
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
HOOK = ROOT / "sb3_ppo_ext_zoo_hook.py"
PTH = "sb3_ppo_ext_zoo.pth"
# Python runs a line of a `.pth` file if it begins with `import`. If the checkout of an editable install has been deleted, the
# module is missing too, and without the `except` Python would report an error at every start.
PTH_LINE = (
    "import os; os.environ.get('SB3_PPO_EXT_AUTOREGISTER') == '0' or "
    r"exec('try: import sb3_ppo_ext_zoo_hook as hook; hook.install()\nexcept ImportError: pass')"
    "\n"
)
# The modules need GCC or Clang, and POSIX threads and clocks: MSVC and clang-cl have neither.
ARE_OPTIONAL = os.environ.get("SB3_PPO_EXT_REQUIRE_EXTENSIONS") != "1" or sys.platform == "win32"
MLP = Extension(
    "sb3_ppo_ext.engines.native._mlp",
    ["sb3_ppo_ext/engines/native/csrc/mlp.c"],
    depends=sorted(str(path.relative_to(ROOT)) for path in (ROOT / "sb3_ppo_ext/engines/native/csrc").glob("*.h")),
    # Without errno and traps, square roots and comparisons can be vectorized; NaN and infinity are still respected.
    extra_compile_args=["-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-pthread"],
    extra_link_args=["-pthread"],
    optional=ARE_OPTIONAL,
)
# For POSIX; elsewhere it does not compile, and torch adds up instead.
SHARED_SUM = Extension(
    "sb3_ppo_ext.distributed._shared_sum",
    ["sb3_ppo_ext/distributed/csrc/shared_sum.c"],
    depends=["sb3_ppo_ext/common/csrc/waiting.h"],
    extra_compile_args=["-O3", "-std=c11", "-D_POSIX_C_SOURCE=200809L"],
    optional=ARE_OPTIONAL,
)
FLAGS = Extension(
    "sb3_ppo_ext.envs.parallel._flags",
    ["sb3_ppo_ext/envs/parallel/csrc/flags.c"],
    depends=["sb3_ppo_ext/common/csrc/waiting.h"],
    extra_compile_args=["-O3"],
    optional=ARE_OPTIONAL,
)
SCAN = Extension(
    "sb3_ppo_ext.memory._scan",
    ["sb3_ppo_ext/memory/csrc/scan.c"],
    extra_compile_args=["-O3", "-std=c11"],
    optional=ARE_OPTIONAL,
)


def project_metadata(url: str, version: str) -> dict[str, Any]:
    """
    :param url: Address of the repository on GitHub, or an empty string
    :param version: Version that is released, whose tag the links lead to
    :return: Arguments of ``setup``: the addresses of the project, and the README with badges and absolute links
    """
    if not url:
        return {}
    files, folders = f"{url}/blob/v{version}", f"{url}/tree/v{version}"
    addresses = {
        "Source": url,
        "Documentation": f"{files}/docs/index.md",
        "Changelog": f"{files}/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }

    def absolute(link: re.Match[str]) -> str:
        is_picture, target = bool(link["picture"]), link["target"]
        base = f"{url}/raw/v{version}" if is_picture else folders if target.endswith("/") else files
        return f"{link['text']}({base}/{target})"

    # A link of Markdown to a file of the repository: neither an address nor a heading of the README itself
    relative = r"(?P<text>(?P<picture>!)?\[[^\]]*\])\((?!\w+:|#)(?P<target>[^)\s]+)\)"
    title, _, readme = (ROOT / "README.md").read_text(encoding="utf-8").split("\n\n", 2)
    text = f"{title}\n\n{badges(url, version)}\n\n{re.sub(relative, absolute, readme)}"
    return {"project_urls": addresses, "long_description": text}


def badges(url: str = "", version: str = "") -> str:
    """
    :param url: Address of the repository on GitHub. Without it, links are relative, as in the README of a checkout.
    :param version: Version that is released
    :return: Markdown with pictures that lead to the tests, the documentation, the notebook and the supported versions
    """
    # GitHub shows a README below `blob/main` or its pictures below `raw/main`: two folders up is the repository.
    repository, files, shields = url or "../..", f"{url}/blob/v{version}/" if url else "", "https://img.shields.io/badge"
    # Colab reads a notebook by its absolute address; the page says how to open it.
    colab = files.replace("https://github.com/", "https://colab.research.google.com/github/", 1)
    notebook = f"{colab}examples/quick_start.ipynb" if url else "docs/notebook.md"
    kinds = [
        ("Tests", f"{repository}/actions/workflows/ci.yml/badge.svg", f"{repository}/actions/workflows/ci.yml"),
        ("Documentation", f"{shields}/docs-pages-blue", f"{files}docs/index.md"),
        ("Colab", "https://colab.research.google.com/assets/colab-badge.svg", notebook),
        ("Python", f"{shields}/python-3.10_to_3.14-blue", f"{files}setup.cfg"),
    ]
    return "\n".join(f"[![{label}]({picture})]({target})" for label, picture, target in kinds)


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
    version = re.search(r"^version = (\S+)", (ROOT / "setup.cfg").read_text(encoding="utf-8"), re.MULTILINE)
    assert version is not None
    setup(
        cmdclass={"build_py": BuildWithStartupHook},
        ext_modules=[MLP, SHARED_SUM, FLAGS, SCAN],
        **project_metadata(os.environ.get("SB3_PPO_EXT_URL", "").rstrip("/"), version[1]),
    )
