"""What the constructor checks before SB3's, and says after the set-up."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING

import numpy as np
import torch as th

from sb3_ppo_ext.common.validation import check_device, check_dictionary, check_type, refuse
from sb3_ppo_ext.distributed.launch import find_launch
from sb3_ppo_ext.options.policy_kwargs import check_policy
from sb3_ppo_ext.options.values import Flag
from sb3_ppo_ext.policies.distribution_checks import check_exploration

if TYPE_CHECKING:
    from sb3_ppo_ext.options.constructor import ConfiguredPPO


def check_arguments(
    policy: object,
    env: object,
    use_sde: object,
    rollout_buffer_kwargs: object,
    tensorboard_log: object,
    verbose: object,
    device: th.device | str,
    needs_env: bool,
) -> None:
    """
    Check the arguments that SB3's constructor reads, before it does.

    :param policy: Policy, a name or a class
    :param env: Environment, or its id
    :param use_sde: Whether to use gSDE
    :param rollout_buffer_kwargs: Keyword arguments of the rollout buffer
    :param tensorboard_log: Folder for TensorBoard, ``None`` for no such log
    :param verbose: Verbosity level
    :param device: Device
    :param needs_env: Whether the model is set up, so that it needs an environment
    :raises ValueError: if one of them is not valid
    """
    check_policy(policy)
    check_device(device)
    check_logging(tensorboard_log, verbose)
    Flag(as_sb3=True).check("use_sde", use_sde)
    if use_sde:
        check_exploration(bool(use_sde), getattr(env, "action_space", None))
    if rollout_buffer_kwargs is not None:
        check_dictionary("rollout_buffer_kwargs", rollout_buffer_kwargs)
    if env is None and needs_env:
        refuse("env", None, "give an environment, or the id of one")


def check_logging(tensorboard_log: object, verbose: object) -> None:
    """
    :param tensorboard_log: Folder for TensorBoard, ``None`` for no such log
    :param verbose: Verbosity level
    :raises ValueError: if one of them is of another type
    """
    check_type("tensorboard_log", tensorboard_log, (str, os.PathLike, type(None)), "give the path of a folder, or None")
    check_type("verbose", verbose, (int, float, np.number, np.bool_), "give 0, 1 or 2")


@contextmanager
def without_device_line() -> Iterator[None]:
    """Leave out the line in which SB3 prints the device, before it can be known."""
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            yield
    finally:
        print(printed.getvalue().replace("Using cpu device\n", "", 1), end="")


def warn_about_minibatches(model: ConfiguredPPO) -> None:
    """
    Warn, in the name of the caller of the constructor, of a last minibatch that is smaller, as SB3 does, and of a single step,
    before which the policy has not moved.

    :param model: Model that has been set up
    """
    if model.env is None:
        return
    buffer_size = model.env.num_envs * model.n_steps * find_launch(model.distributed).size
    if buffer_size % model.batch_size > 0:
        warnings.warn(
            f"You have specified a mini-batch size of {model.batch_size},"
            f" but because the `RolloutBuffer` is of size `n_steps * n_envs = {buffer_size}`,"
            f" after every {buffer_size // model.batch_size} untruncated mini-batches,"
            f" there will be a truncated mini-batch of size {buffer_size % model.batch_size}\n"
            f"We recommend using a `batch_size` that is a factor of `n_steps * n_envs`.\n"
            f"Info: (n_steps={model.n_steps} and n_envs={model.env.num_envs})",
            stacklevel=3,
        )
    if has_single_step(model) and (model.kl_coef > 0 or model.adaptive_lr_kl is not None):
        warnings.warn(
            "`kl_coef`, `kl_target` and `adaptive_lr_kl` depend on how far the policy has moved before each step of"
            " the optimizer, and there is only one step per update, before which it has not moved: they have no effect."
            f" Raise n_epochs={model.n_epochs}, or lower batch_size={model.batch_size}.",
            stacklevel=3,
        )


def has_single_step(model: ConfiguredPPO) -> bool:
    """
    :param model: Model that has been set up
    :return: Whether an update has one step of the optimiser, before which the policy has not moved
    """
    if model.env is None or model.n_epochs > 1:
        return False
    size = find_launch(model.distributed).size
    return model.batch_size * model.accumulate_grad >= model.env.num_envs * model.n_steps * size
