"""Losses for the ``extra_actor_loss`` of a subclass."""

from sb3_ppo_ext.update.mirror import mirror_loss
from sb3_ppo_ext.update.smoothness import smoothness_loss

__all__ = ["mirror_loss", "smoothness_loss"]
