"""
What the start-up hook costs an interpreter that never imports RL Zoo: ``python scripts/startup_cost.py``.

Runs ``python -c pass`` with the hook and without it, one after the other, and reports the difference with
its standard error. A third column has the hook switched off by its environment variable.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from setup import HOOK, PTH, pth_line


def seconds(python: Path, **environment: str) -> float:
    start = time.perf_counter()
    subprocess.run([python, "-c", "pass"], check=True, env={**os.environ, **environment})
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=300)
    runs = parser.parse_args().runs

    with tempfile.TemporaryDirectory() as folder:
        pythons = []
        for name in ("without", "with"):
            venv.create(Path(folder, name))
            pythons.append(Path(folder, name, "bin", "python"))
        [site_packages] = Path(folder, "with", "lib").glob("python*/site-packages")
        (site_packages / PTH).write_text(pth_line(HOOK.read_text()))
        without, with_hook = pythons

        def measure() -> list[float]:
            return [seconds(without), seconds(with_hook), seconds(with_hook, SB3_PPO_EXT_AUTOREGISTER="0")]

        times = 1000 * np.array([measure() for _ in range(runs)])

    median = np.median(times, axis=0)
    print(f"{sys.version.split()[0]}, {runs} interleaved runs, medians in ms")
    print(f"without: {median[0]:.2f}   with the hook: {median[1]:.2f}   switched off: {median[2]:.2f}")
    for name, column in (("the hook", 1), ("switched off", 2)):
        cost = times[:, column] - times[:, 0]
        print(f"{name}: {np.median(cost):+.2f} ms (mean {cost.mean():+.2f} ± {cost.std() / runs**0.5:.2f})")


if __name__ == "__main__":
    main()
