"""Metadata lives in ``setup.cfg``; this file adds what setuptools cannot declare: files at the root of site-packages."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

STARTUP = Path(__file__).parent / "startup"


class BuildWithStartupHook(build_py):
    """Copy ``startup/*`` to the root of the wheel, so that Python runs it at start-up and pip removes it again."""

    def run(self) -> None:
        super().run()
        root = Path(self._root_of_the_wheel())
        root.mkdir(parents=True, exist_ok=True)
        for source in sorted(STARTUP.iterdir()):
            if source.is_file():
                self.copy_file(str(source), str(root / source.name))

    def _root_of_the_wheel(self) -> str:
        if self.editable_mode:
            # Files in `build_lib` stay out of an editable wheel, those of the install scheme go in.
            return str(self.get_finalized_command("install").install_lib)
        return str(self.build_lib)


setup(cmdclass={"build_py": BuildWithStartupHook})
