"""The number of environments is free: an entry says how many samples an update has, and other numbers keep that."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

from sb3_ppo_ext.common.cores import available_cores
from sb3_ppo_ext.common.type_aliases import Kwargs
from sb3_ppo_ext.common.validation import check_number, refuse

# Fewest steps per environment in a rollout: with fewer, advantages reach over hardly any steps.
FEWEST_STEPS = 16
# Number of steps from which on a rollout sees enough of an episode, so that all environments can begin together
LONG_ROLLOUT = 64
# Defaults of the model
DEFAULT_STEPS, DEFAULT_BATCH_SIZE = 2048, 64
# Largest change of the number of samples, as a share, that is made without a word for minibatches of equal size
LARGEST_CHANGE = 0.1


def check_n_envs(n_envs: object) -> None:
    """
    :param n_envs: Number of environments
    :raises ValueError: if it is neither a number of at least 1 nor ``"auto"``
    """
    if isinstance(n_envs, str) and n_envs != "auto":
        refuse("n_envs", n_envs, 'give a number of at least 1, or "auto" for at least one environment on each core')
    if n_envs != "auto":
        check_number("n_envs", n_envs, 1, integer=True)


def number_of(n_envs: Any, of_entry: Any) -> int:
    """
    :param n_envs: Number of environments, or ``"auto"`` for that of the entry, but at least one on each core
    :param of_entry: That of the entry, which may be ``"auto"`` as well
    :return: Number of environments
    """
    least = 1 if of_entry == "auto" else int(of_entry)
    return max(least, available_cores()) if n_envs == "auto" else int(n_envs)


def rollouts_for(entry: Kwargs, n_envs: int, stacklevel: int = 3) -> Kwargs:
    """
    Say so if the number of samples cannot be kept.

    :param entry: Entry with ``n_steps``, ``n_envs`` and ``batch_size``
    :param n_envs: Number of environments
    :param stacklevel: Whose line the warning names
    :return: ``n_steps`` of a rollout with which an update has as many samples as the entry says, or nearly as many in
        minibatches of equal size, if there is such a number; ``batch_size`` if a rollout is smaller than a minibatch of the
        entry; and ``staggered_start`` if the steps are few for another number of environments
    """
    own_steps, batch_size = entry.get("n_steps", DEFAULT_STEPS), entry.get("batch_size", DEFAULT_BATCH_SIZE)
    n_samples = own_steps * entry.get("n_envs", 1)
    n_steps = int(max(_nearest(n_samples, n_envs, batch_size), min(FEWEST_STEPS, own_steps)))
    if abs(n_steps * n_envs - n_samples) > LARGEST_CHANGE * n_samples:
        warnings.warn(
            f"`n_envs={n_envs}`: the preset has {n_samples} samples per update, and this one {n_steps * n_envs}, "
            f"{n_steps} steps of each environment. Give `n_steps` for another number.",
            stacklevel=stacklevel,
        )
    is_short = n_envs != entry.get("n_envs", 1) and n_steps < LONG_ROLLOUT
    is_one_batch = n_steps * n_envs < batch_size <= n_samples
    of_batch = {"batch_size": n_steps * n_envs} if is_one_batch else {}
    return {"n_steps": n_steps, **of_batch, **({"staggered_start": True} if is_short else {})}


def _nearest(n_samples: int, n_envs: int, batch_size: int) -> int:
    if n_samples % n_envs == 0:
        return n_samples // n_envs
    multiple = batch_size // math.gcd(batch_size, n_envs)
    n_steps = multiple * round(n_samples / (n_envs * multiple))
    return n_steps if abs(n_steps * n_envs - n_samples) <= LARGEST_CHANGE * n_samples else n_samples // n_envs


def with_environments(hyperparams: Mapping[str, object], given: Mapping[str, object], of_trial: int | None = None) -> Kwargs:
    """
    :param hyperparams: Hyperparameters of an entry
    :param given: Hyperparameters that the user gives, such as another ``n_envs``
    :param of_trial: Number of environments of the trial that ``n_steps`` is from, ``None`` if it is from the entry
    :return: Hyperparameters that replace those of the entry: ``n_envs`` as a number, and what :func:`rollouts_for` says unless
        ``n_steps`` is given
    :raises ValueError: if a number is not valid
    """
    own = hyperparams.get("n_envs", 1) if of_trial is None else of_trial
    wanted = given.get("n_envs", own)
    for n_envs in (own, wanted):
        check_n_envs(n_envs)
    if "n_envs" not in given and of_trial is None and own != "auto":
        return {}
    n_envs = number_of(wanted, own)
    if own == "auto" or n_envs == own or "n_steps" in given:
        return {"n_envs": n_envs}
    check_number("n_steps", hyperparams.get("n_steps", DEFAULT_STEPS), 1, integer=True)
    found = rollouts_for({**hyperparams, "n_envs": own}, n_envs)
    return {"n_envs": n_envs, **found, **{name: value for name, value in given.items() if name in found}}
