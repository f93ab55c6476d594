"""The hyperparameters of a model as numbers and strings, for TensorBoard, Weights & Biases and the like."""

import numpy as np
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import HParam

from sb3_ppo_ext.common.schedules import as_in_yaml
from sb3_ppo_ext.options import ALL_OPTIONS

# Metrics in the table of TensorBoard, as in SB3's documentation; it shows those that are logged
METRICS = ("rollout/ep_rew_mean", "rollout/ep_len_mean", "eval/mean_reward", "train/approx_kl", "train/value_loss")
# Other outputs refuse them, and they are no numbers that change.
_NOT_FOR = ("stdout", "log", "json", "csv")


def hyperparameters(model: BaseAlgorithm) -> dict[str, bool | int | float | str | None]:
    """
    The options of a model in the form that they have in a YAML file, where a schedule is a string such as ``"lin_0.001"``.
    With Weights & Biases: ``wandb.init(config=hyperparameters(model))``.

    :param model: ``PPOExt``
    :return: All options by name, with ``algorithm``, ``policy``, ``policy_kwargs`` and ``n_envs``. Everything other than
        numbers, strings and ``None`` is described in a string
    """
    options = {name: getattr(model, option.attribute) for name, option in ALL_OPTIONS.items()}
    of_policy = {"policy": model.policy_class.__name__, "policy_kwargs": str(model.policy_kwargs)}
    return {
        "algorithm": type(model).__name__,
        **of_policy,
        "n_envs": model.n_envs,
        **{name: _plain(value) for name, value in options.items()},
    }


def _plain(value: object) -> bool | int | float | str | None:
    value = as_in_yaml(value)
    if isinstance(value, np.generic):
        value = value.item()
    return value if isinstance(value, bool | int | float | str | None) else str(value)


class HParamCallback(BaseCallback):
    """
    Shows the :func:`hyperparameters` in TensorBoard's tab HPARAMS, where training runs can be compared. In RL Zoo:
    ``callback: sb3_ppo_ext.HParamCallback`` in an entry, with ``--tensorboard-log``.

    :param metrics: Names of logged values that are shown beside the hyperparameters
    """

    def __init__(self, metrics: tuple[str, ...] = METRICS):
        super().__init__()
        self.metrics = metrics

    def _on_training_start(self) -> None:
        # TensorBoard leaves out what is None.
        values = {name: "None" if value is None else value for name, value in hyperparameters(self.model).items()}
        self.logger.record("hparams", HParam(values, dict.fromkeys(self.metrics, 0.0)), exclude=_NOT_FOR)

    def _on_step(self) -> bool:
        return True
