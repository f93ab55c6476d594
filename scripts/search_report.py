"""
Tables of `search_default.py`. Not a script.
"""

from pathlib import Path

import pandas as pd


def report(rows: pd.DataFrame, folder: Path) -> None:
    print(len(rows), "runs")
