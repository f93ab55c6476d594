"""Cases of a test with many parameters: some for the default suite, the others for ``make test-slow``; choices in messages."""

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(n: int, cases: Iterable[Any], *also: Any) -> list[Any]:
    """
    :param n: The default suite runs every n-th case, beginning with the first
    :param cases: Parameters of the test
    :param also: Cases that the default suite runs as well
    :return: All cases, of which the others are marked as slow
    """
    slow = pytest.mark.slow
    return [case if number % n == 0 or case in also else pytest.param(case, marks=slow) for number, case in enumerate(cases)]


def listed(choices: Iterable[str]) -> str:
    """
    :param choices: Names that are registered
    :return: How a message lists them
    """
    *most, last = (f'"{choice}"' for choice in choices)
    return f"{', '.join(most)} or {last}"
