"""Names of types that many files share, beside those of ``stable_baselines3.common.type_aliases``."""

from typing import Any, TypeAlias

# Keyword arguments by name, such as `policy_kwargs` and `env_kwargs`
Kwargs: TypeAlias = dict[str, Any]
# What an environment says of a step, or of a reset
Info: TypeAlias = dict[str, Any]
# What a `state_dict` returns: tensors, numbers and dictionaries of these by name
StateDict: TypeAlias = dict[str, Any]
# An array or a tensor, or a dictionary or tuple of these, as observations and actions are. `Any`, since NumPy's and PyTorch's
# classes have no type in common, and what is computed with them is written once for both
Arrays: TypeAlias = Any
# What JAX computes with: arrays and trees of them, such as keys and states of environments. `Any`, since JAX need not be there
JaxTree: TypeAlias = Any
# Environments of Gymnax and Brax, and their parameters, for the same reason
JaxEnv: TypeAlias = Any
