"""The options of PPOExt: one row each in ``table.py``. Checks, documentation and tests derive from the rows."""

from sb3_ppo_ext.options.rules import check_arguments, check_options, convert_options
from sb3_ppo_ext.options.table import ALL_OPTIONS, OWN_OPTIONS, PPOExtOptions

__all__ = ["ALL_OPTIONS", "OWN_OPTIONS", "PPOExtOptions", "check_arguments", "check_options", "convert_options"]
