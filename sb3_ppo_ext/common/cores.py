"""The processor cores that this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def available_cores() -> int:
    """
    :return: Number of cores that this process may use, at least 1: those of its affinity (``taskset``), and no more than the
        quota of its control group allows, as in a container with ``--cpus``
    """
    affinity = getattr(os, "sched_getaffinity", None)
    n_cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, min([n_cores, *_quotas()]))


def _quotas() -> list[int]:
    """Cores that each control group allows, from that of this process to the root, rounded up."""
    folders = [CGROUPS]
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, _, path = line.split(":", 2)
            if number == "0":  # version 2
                folder = CGROUPS / path.lstrip("/")
                folders += [each for each in (folder, *folder.parents) if CGROUPS in each.parents]
    except (OSError, ValueError):
        return []
    return [quota for folder in folders if (quota := _quota(folder)) is not None]


def _quota(folder: Path) -> int | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else math.ceil(int(quota) / int(period))
    except (OSError, ValueError, ZeroDivisionError):
        return None
