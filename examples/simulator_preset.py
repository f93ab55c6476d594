"""Hyperparameters of the entry `simulator` for any number of copies, for the examples beside this file."""

from typing import Any

from torch import nn

from sb3_ppo_ext import presets

# Arguments of RL Zoo, not of the model
OF_THE_ZOO = ("n_envs", "n_timesteps", "normalize", "policy")


def simulator_preset(n_envs: int) -> dict[str, Any]:
    """
    :param n_envs: Number of copies
    :return: Keyword arguments for ``PPOExt``
    """
    preset = {name: value for name, value in presets()["simulator"].items() if name not in OF_THE_ZOO}
    networks = {"net_arch": [512, 256, 128], "activation_fn": nn.ELU}
    return {**preset, "batch_size": n_envs * preset["n_steps"] // 4, "policy_kwargs": networks}
