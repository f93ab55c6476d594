"""Schedules as classes, for other algorithms of SB3. The options of PPOExt also take strings such as ``"lin_0.001"``."""

from sb3_ppo_ext.common.schedules import DecaySchedule, HoldThenLinearToZero, KLAdaptive, LinearToZero

__all__ = ["DecaySchedule", "HoldThenLinearToZero", "KLAdaptive", "LinearToZero"]
