"""Which engine computes rollouts and updates."""

from typing import Any

from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer

from sb3_ppo_ext.fast_policy import why_not

BACKENDS = ("auto", "eager", "native")


def why_not_native(model: Any, own_loss: bool) -> str | None:
    """
    :param model: A ``PPOExt`` with its policy
    :param own_loss: Whether a subclass adds a loss of its own
    :return: What keeps the model from ``backend="native"``, ``None`` if nothing does
    """
    if own_loss:
        return "`extra_actor_loss` may differentiate more of the policy than its outputs"
    if type(model.rollout_buffer) not in (RolloutBuffer, DictRolloutBuffer):
        return f"{type(model.rollout_buffer).__name__} is not SB3's"
    return why_not(model.policy)
