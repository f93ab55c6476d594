"""
``ppo_ext`` in RL Zoo: registration, hyperparameters, tuning and the command line.

The installation registers it as soon as ``rl_zoo3`` is imported. Where that is switched off
(``SB3_PPO_EXT_AUTOREGISTER=0``) or not possible, there are :func:`register` and ``python -m sb3_ppo_ext.zoo``, which
takes the name of a Zoo script (``train``, ``enjoy``, ...) and its arguments.
"""

from sb3_ppo_ext.zoo.registration import extend, register

__all__ = ["extend", "register"]
