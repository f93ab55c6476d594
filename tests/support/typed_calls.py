"""
What mypy says about the options, for `make lint`, which runs nothing of it: each error that is ignored here must be found, as
`warn_unused_ignores` refuses comments without one.
"""

from typing_extensions import assert_type

from sb3_ppo_ext import PPOExt


def right() -> None:
    """Values and schedules are accepted, and options are known as attributes."""
    model = PPOExt("MlpPolicy", "CartPole-v1", action_dist="beta", ent_coef="lin_0.01")
    assert_type(model.vtrace, bool)


def wrong() -> None:
    """A typo in a value, one in a name, and a wrong type."""
    PPOExt("MlpPolicy", "CartPole-v1", action_dist="betta")  # type: ignore[arg-type]
    PPOExt("MlpPolicy", "CartPole-v1", vtrase=True)  # type: ignore[arg-type]
    PPOExt("MlpPolicy", "CartPole-v1", n_steps=2.5)  # type: ignore[arg-type]
