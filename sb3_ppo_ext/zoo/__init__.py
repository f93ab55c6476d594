"""
``ppo_ext`` in RL Zoo: registration, hyperparameters, tuning and the command line.

Where the package is installed, ``ppo_ext`` is registered as soon as ``rl_zoo3`` is imported. If that is switched off
(``SB3_PPO_EXT_AUTOREGISTER=0``) or not possible, call :func:`register`, or run ``python -m sb3_ppo_ext.zoo`` with the name of
a Zoo script (``train``, ``enjoy``, ...) and its arguments.
"""

from sb3_ppo_ext.zoo.registration import extend, register

__all__ = ["extend", "register"]
