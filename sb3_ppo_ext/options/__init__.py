"""The options of PPOExt: arguments of its constructor, with a row each in ``table.py``. Checks and docs derive from both."""

from sb3_ppo_ext.options.constructor import ConfiguredPPO
from sb3_ppo_ext.options.rules import check_options, convert_options
from sb3_ppo_ext.options.table import ALL_OPTIONS, OWN_OPTIONS

__all__ = ["ALL_OPTIONS", "OWN_OPTIONS", "ConfiguredPPO", "check_options", "convert_options"]
