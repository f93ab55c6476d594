"""Runs programs, and says how they end."""

import contextlib
import io
import random
import re
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch as th
from support.fuzzing import vocabulary
from support.fuzzing.drawing import drawn
from support.fuzzing.zips import ZipProgram

import sb3_ppo_ext
from sb3_ppo_ext.common.guards import NonFiniteDataError, NonFiniteGradientError, NonFinitePolicyError
from sb3_ppo_ext.common.validation import BadArgumentError

GUARDS = (NonFiniteDataError, NonFinitePolicyError, NonFiniteGradientError)
PACKAGE = Path(sb3_ppo_ext.__file__).parent
# "other" is a finding: an error of another kind, a promise that does not hold, a crash or a hang.
KINDS = ("trained", "refused", "refused later", "stopped by a guard", "other")


@dataclass(frozen=True)
class Outcome:
    """
    :param kind: One of ``KINDS``
    :param about: The option or the place that it is about, the same for all findings with the same cause
    :param message: Last line of the error, empty if there is none
    :param details: Traceback, empty if there is none
    :param warnings: Warnings of NumPy and PyTorch about calculations, and refusals by others than us: findings of a
        second class
    """

    kind: str
    about: str = ""
    message: str = ""
    details: str = ""
    warnings: tuple = field(default=())


def run(program):
    """
    :param program: Program
    :return: How it ends
    """
    random.seed(0), np.random.seed(0), th.manual_seed(0)
    names = {name: getattr(vocabulary, name) for name in vocabulary.__all__}
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("always")
        outcome = _run(program, names)
    return Outcome(outcome.kind, outcome.about, outcome.message, outcome.details, (*outcome.warnings, *_suspicious(caught)))


def run_seed(seed):
    """How the program of a seed ends."""
    return run(drawn(seed))


def run_zip(seed):
    """How loading a zip with the damage of a seed ends."""
    return run(ZipProgram(seed))


def _run(program, names):
    trained = False
    for step in program.lines():
        try:
            exec(compile(step.text, "<program>", "exec"), names)
        except Exception as error:
            return _failed(error, step, trained, program)
        trained = trained or step.text.startswith("learn")
    return Outcome("trained")


def _failed(error, step, trained, program):
    message = f"{type(error).__name__}: {error}"[:600]
    # Before a step is made, PyTorch refuses distributions whose parameters are not finite, as in SB3.
    is_guard = isinstance(error, GUARDS) or str(error).startswith("Expected parameter ")
    if is_guard and program.is_wild:
        return Outcome("stopped by a guard", type(error).__name__, message)
    if isinstance(error, ValueError) and step.may_refuse and not isinstance(error, GUARDS):
        return _refused(error, message, "refused later" if trained else "refused")
    details = f"in `{step.text}`\n" + "".join(traceback.format_exception(error))
    return Outcome("other", f"{type(error).__name__} {_places(error)} {_shape(str(error))}", message, details)


def _refused(error, message, kind):
    named = re.match(r"`(\w+)", str(error))
    innermost = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    is_ours = isinstance(error, BadArgumentError) or PACKAGE in innermost.parents or "stable_baselines3" in innermost.parts
    unclear = () if is_ours else (f"refused by {'/'.join(innermost.parts[-2:])}: {message[:200]}",)
    about = named[1] if named else type(error).__name__
    return Outcome(kind, about, message, warnings=unclear)


def _places(error):
    """Where the error was raised, and the innermost place in the package."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if PACKAGE in Path(frame.filename).parents]
    return " < ".join(f"{Path(frame.filename).name}:{frame.name}" for frame in (frames[-1], *ours[-1:]))


def _shape(message):
    """The message without what differs between programs."""
    return re.sub(r"[-+]?\d[\d.e+-]*|'[^']*'", "_", message.split("\n")[0])[:60]


def _suspicious(caught):
    """Warnings about calculations, once each."""
    texts = {}
    for each in caught:
        path = Path(each.filename)
        if each.category is RuntimeWarning or (each.category is UserWarning and "torch" in path.parts):
            texts[f"{each.category.__name__}: {str(each.message)[:150]} ({path.parent.name}/{path.name}:{each.lineno})"] = each
    return tuple(texts)
