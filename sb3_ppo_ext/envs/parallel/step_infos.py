"""Infos of a step on their way between two processes."""

from __future__ import annotations

import pickle
from array import array
from typing import TypeAlias

import numpy as np

from sb3_ppo_ext.common.type_aliases import Info

# Infos with more in them than whether the episode was truncated, and infos of new episodes, each by the index of the
# environment in its process
StepInfos: TypeAlias = tuple[dict[int, Info], dict[int, Info]]
# Types of numbers that are exact as a double, and a letter for each. To pickle NumPy's takes ten times as long.
LETTERS: dict[type, str] = {float: "p", bool: "b", np.float64: "d", np.float32: "f", np.bool_: "?"}
TYPES: dict[str, type] = {letter: kind for kind, letter in LETTERS.items()}


def pickled_infos(infos: StepInfos) -> bytes:
    """
    :param infos: Infos of a step
    :return: The infos, pickled. Those of numbers with the same keys and types are in one array
    """
    groups: dict[tuple[tuple[str, ...], tuple[type, ...]], list[int]] = {}
    for index, info in infos[0].items():
        groups.setdefault((tuple(info), tuple(map(type, info.values()))), []).append(index)
    numbers, others = [], {}
    for (keys, types), indices in groups.items():
        if LETTERS.keys() >= set(types):
            values = array("d")
            for index in indices:
                values.extend(infos[0][index].values())
            numbers.append((keys, "".join([LETTERS[kind] for kind in types]), indices, values.tobytes()))
        else:
            others.update({index: infos[0][index] for index in indices})
    return pickle.dumps((numbers, others, infos[1]), protocol=5)


def unpickled_infos(data: bytes | memoryview) -> StepInfos:
    """
    :param data: What :func:`pickled_infos` returns, or a ``memoryview`` of it
    :return: The infos
    """
    numbers, infos, resets = pickle.loads(data)
    for keys, letters, indices, values in numbers:
        types = [TYPES[letter] for letter in letters]
        rest = iter(memoryview(values).cast("d").tolist())
        for index in indices:
            # `rest` comes last, since `zip` takes from each before it finds that one has ended.
            infos[index] = {key: kind(value) for key, kind, value in zip(keys, types, rest, strict=False)}
    return infos, resets
