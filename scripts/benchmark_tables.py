"""The tables of ``docs/performance.md`` from ``benchmark.json``: ``benchmark_speed.py --markdown`` prints them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Results = Mapping[str, Mapping[str, Any]]
# Names in the documentation
LABELS = {
    "SBX": "SBX (JAX)",
    "eager": '`PPOExt`, `backend="eager"`',
    "PPOExt": "**`PPOExt`**, SB3's `DummyVecEnv`",
    "PPOExt, FastDummyVecEnv": "**`PPOExt`**, `FastDummyVecEnv`",
    "PPOExt, VectorEnvAdapter": "**`PPOExt`**, `VectorEnvAdapter`",
    "d, VectorEnvAdapter": "d, `VectorEnvAdapter`",
    "1 environments": "1 environment",
    "Beta": '`action_dist="beta"`, b',
    "squashed Gaussian": '`action_dist="squashed_gaussian"`, b',
    "gSDE": "gSDE, b",
    "256-256, a": "networks of 256-256, a",
    "256-256, b": "networks of 256-256, b",
    "256-256, c": "networks of 256-256, c",
    "Mish, b": "Mish, b",
    "compile": '`backend="compile"`',
    "Dict": "Dict observations, b",
    "CNN": "CNN on four frames of 84 x 84 (`fused`)",
    "default": "`make` with the entry `default`, HalfCheetah-v5; SB3 with its `VecNormalize`",
    "all losses": "`bounds_coef`, `kl_coef`, `dual_clip`, `clip_range_vf`, b",
}


def table(corner: str, columns: Results, cell: Callable[[Any], str]) -> str:
    """
    :param corner: Text of the upper left cell
    :param columns: Results of each column by the name of their row; a column may lack some rows
    :param cell: Formats a result
    :return: The table in Markdown
    """
    names = list(dict.fromkeys(row for column in columns.values() for row in column))
    lines = [[corner, *(LABELS.get(name, name) for name in columns)], ["---"] * (len(columns) + 1)]
    for name in names:
        cells = [cell(column[name]) if name in column else "" for column in columns.values()]
        lines.append([LABELS.get(name, name), *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def transposed(rows: Results) -> Results:
    columns: dict[str, dict[str, Any]] = {}
    for row, cells in rows.items():
        for column, value in cells.items():
            columns.setdefault(column, {})[row] = value
    return columns


def ratio(result: Mapping[str, float]) -> str:
    return f"{result['ratio']:.1f} ({result['low']:.1f} to {result['high']:.1f})"


def number(value: float) -> str:
    """Format with two significant digits, or with all digits before the decimal point."""
    return f"{value:.0f}" if abs(value) >= 10 else f"{value:.2g}"


def share(value: float) -> str:
    return f"{value:.2f}"


# For each table: the text of its corner, whether the results are its rows, and the format of its cells
PARTS: dict[str, tuple[str, bool, Callable[[Any], str]]] = {
    "main": ("steps/s over SB3's", False, ratio),
    "policies": ("other policies and options", True, ratio),
    "growth": ("CartPole-v1, 2048 steps a rollout, batch 256, 4 epochs", False, ratio),
    "startup": ("", True, number),
    "compile": ("steps/s over SB3's", False, ratio),
}
PROFILE: dict[str, tuple[str, bool, Callable[[Any], str]]] = {
    "minibatch": ("µs for 64 samples, 3 inputs, 64-64 tanh twice, Gaussian", False, number),
    "operations": ("10⁹ operations/s, 2048 samples", False, number),
    "shares": ("share of the time", False, share),
    "images": ("forward and backward of 256 images of 84 x 84", False, number),
}


def tables(results: Results) -> Iterator[str]:
    """
    :param results: Results by part, as in ``benchmark.json``; parts may be missing
    :return: The table of each part, and the tables of ``profile``
    """
    profile = results.get("profile", {})
    for found, wanted in ((results, PARTS), (profile, PROFILE)):
        for name, (corner, are_rows, cell) in wanted.items():
            if name in found:
                yield table(corner, transposed(found[name]) if are_rows else found[name], cell)
