"""Registers the tasks of the package MinAtar with Gymnasium, for ``--gym-packages minatar_ids``. Not a script."""

from minatar.gym import register_envs  # type: ignore[import-not-found, import-untyped, unused-ignore]

register_envs()
