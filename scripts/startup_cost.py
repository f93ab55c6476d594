"""
What the start-up hook costs an interpreter that never imports RL Zoo: ``python scripts/startup_cost.py``.

Runs ``python -c pass`` without the hook, with it, with it where no bytecode of its module is cached, and with it switched off
by its environment variable, one after the other. Reports each difference from the first with its standard error.
"""

import argparse
import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from setup import HOOK, PTH, PTH_LINE


def make_python(folder: Path, with_hook: bool, cached: bool = False) -> Path:
    venv.create(folder)
    [site_packages] = folder.glob("lib/python*/site-packages")
    if with_hook:
        hook = shutil.copy(str(HOOK), str(site_packages))
        (site_packages / PTH).write_text(PTH_LINE)
        if cached:
            py_compile.compile(hook)
    return folder / "bin" / "python"


def seconds(python: Path, **environment: str) -> float:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment}
    start = time.perf_counter()
    subprocess.run([python, "-c", "pass"], check=True, env=environment)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=300)
    runs = parser.parse_args().runs

    with tempfile.TemporaryDirectory() as folder:
        without = make_python(Path(folder, "without"), with_hook=False)
        with_hook = make_python(Path(folder, "with"), with_hook=True, cached=True)
        uncached = make_python(Path(folder, "uncached"), with_hook=True)

        def measure() -> list[float]:
            pythons = [seconds(python) for python in (without, with_hook, uncached)]
            return [*pythons, seconds(with_hook, SB3_PPO_EXT_AUTOREGISTER="0")]

        times = 1000 * np.array([measure() for _ in range(runs)])

    print(f"{sys.version.split()[0]}, {runs} interleaved runs; without the hook: {np.median(times[:, 0]):.2f} ms (median)")
    for name, column in (("the hook", 1), ("without cached bytecode", 2), ("switched off", 3)):
        cost = times[:, column] - times[:, 0]
        print(f"{name}: {np.median(cost):+.2f} ms (mean {cost.mean():+.2f} ± {cost.std() / runs**0.5:.2f})")


if __name__ == "__main__":
    main()
