"""Values of options as Python expressions: legal ones, extreme ones, and rubbish."""

import numpy as np

from sb3_ppo_ext.options import ALL_OPTIONS, values

NOT_A_NUMBER = (
    "'x'",
    "'lin_x'",
    "'3e-4'",
    "b'x'",
    "[]",
    "{}",
    "(0.01, 0.1)",
    "object()",
    "None",
    "1j",
    "True",
    "np.array([0.1])",
)
NOT_A_NUMBER += ("np.array(0.5)", "th.tensor(0.5)", "Decimal('0.5')", "Fraction(1, 2)", "int", "nn.Tanh()", "{'pi': 1}", "''")
EXTREME = (
    "0",
    "-0.0",
    "1",
    "1e-300",
    "1e-30",
    "1e30",
    "1e300",
    "-1",
    "-1e-9",
    "float('inf')",
    "-float('inf')",
    "float('nan')",
)
EXTREME += ("10**400", "-(10**400)", "2**31", "2**63", "10**30", "np.float32('inf')", "np.float64('nan')", "np.int8(-1)", "2")
SCHEDULES = (
    "'lin_0.01'",
    "'hold_0.01'",
    "'lin_1e-3'",
    "'lin_0.2'",
    "lambda progress: 0.01 * progress",
    "lambda progress: np.float32(0.02)",
)
SCHEDULES += ("lambda progress: 1 if progress > 0.5 else 0", "lambda progress: 0.1", "partial(max, 0.001)")
BAD_SCHEDULES = ("lambda progress: 'x'", "lambda progress: None", "lambda: 0.1", "lambda progress: float('nan')", "'lin_-1'")
BAD_SCHEDULES += (
    "lambda progress: -1.0",
    "lambda progress: 1 / 0",
    "lambda progress: 10**400",
    "'lin_inf'",
    "'lin_1_0'",
    "'lin_'",
)
BAD_SCHEDULES += (
    "lambda progress: np.array([0.1])",
    "lambda progress: th.tensor(0.1)",
    "lambda progress: 1j",
    "lambda *_: True",
)

# Sizes that cost memory or time have few values. Larger ones are legal, and no subject of these tests.
SMALL = {
    "n_steps": ("1", "2", "3", "4", "5", "8", "8", "8", "16"),
    "n_epochs": ("1", "2", "3"),
    "batch_size": ("2", "3", "4", "7", "8", "8", "16", "64", "1"),
    "stats_window_size": ("0", "1", "5", "100"),
    "priority_segment": ("1", "2", "4", "16"),
    "accumulate_grad": ("1", "2", "3", "7", "100"),
    "seed": ("0", "1", "7", "2**32 - 1", "None"),
    "learning_rate": ("3e-4", "1e-3", "0.01", "0.0"),
}
COSTLY = ("n_steps", "n_epochs")
ORDINARY = ("0.0", "0.01", "0.1", "0.5", "0.9", "1.0", "1.5", "3.0", "0", "1", "2")
ILLEGAL_SIZES = ("0", "-1", "2.5", "float('nan')", "10**400", "-(10**400)", "float('inf')", "np.float32(4)", "'4'")


def evaluated(text):
    """The value of an expression of this module."""
    return eval(text, {"np": np, "float": float})


def is_accepted(accepted, text):
    """Whether an expression of a plain value is accepted."""
    try:
        accepted.check("value", evaluated(text))
    except (ValueError, OverflowError, TypeError):
        return False
    return True


def as_numpy(rng, text):
    """The number as a scalar of NumPy."""
    if isinstance(evaluated(text), int):
        return f"np.{rng.choice(['int64', 'int32', 'uint8'])}({text})" if 0 <= evaluated(text) < 256 else text
    return f"np.{rng.choice(['float64', 'float32'])}({text})"


def legal(rng, name):
    """An ordinary value of an option."""
    row = ALL_OPTIONS[name]
    accepted = row.accepted.accepted if isinstance(row.accepted, values.Optional) else row.accepted
    if isinstance(accepted, values.Choice):
        return repr(rng.choice([choice for choice in accepted.all() if choice != "compile"]))
    if isinstance(accepted, values.Flag | values.FlagOrKeys):
        return rng.choice(["True", "False", "np.bool_(True)"])
    if isinstance(accepted, values.Bounds):
        return rng.choice(["(1e-5, 1e-2)", "[1e-4, 1e-3]", "(1e-3, 1e-3)", "(np.float64(1e-5), 1)", "(0.01, 0.1)"])
    if isinstance(accepted, values.Schedule) and rng.random() < 0.3:
        return rng.choice(SCHEDULES)
    text = rng.choice([text for text in SMALL.get(name, ORDINARY) if text == "None" or is_accepted(accepted, text)])
    return as_numpy(rng, text) if text != "None" and rng.random() < 0.15 else text


def extreme(rng, name):
    """A value at the border of what is accepted, or beyond."""
    accepted = ALL_OPTIONS[name].accepted
    texts = [text for text in EXTREME if name not in COSTLY or not is_accepted(accepted, text)]
    return rng.choice([*texts, *ILLEGAL_SIZES] if name in COSTLY else texts)


def rubbish(rng, name):
    """A value of a wrong type, or a schedule that returns one."""
    is_schedule = "function" in " ".join(ALL_OPTIONS[name].accepted.alternatives())
    return rng.choice(BAD_SCHEDULES if is_schedule and rng.random() < 0.7 else NOT_A_NUMBER)
