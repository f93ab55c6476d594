"""Linear recurrences, in C, see ``csrc/scan.c``."""

import numpy as np

def scan(kept: np.ndarray, added: np.ndarray, is_reversed: bool) -> None: ...
