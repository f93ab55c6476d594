"""Configuration of an update: the options of the model at one moment of the training, which are fixed during the update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sb3_ppo_ext.distributed.ranks import SINGLE, Ranks
from sb3_ppo_ext.policies.mixed_precision import LossScale
from sb3_ppo_ext.update.losses import LossConfig
from sb3_ppo_ext.update.minibatch_loss import ExtraActorLoss

AdvantageNorm = Literal["minibatch", "rollout", "ema"]
BadGradients = Literal["raise", "skip"]


@dataclass(frozen=True)
class UpdateConfig:
    """
    Options of one update. Those that are not listed here are the options of PPOExt with the same name. The defaults are SB3's.

    :param loss: Options of the loss, with the coefficients of this update
    :param priority_beta: Exponent of the importance weights in this update
    :param discrete_actions: Whether the action space is ``Discrete``
    :param samples_latents: Whether the buffer holds the latents of a bounded action distribution instead of actions
    :param extra_actor_loss: Loss that a subclass of ``PPOExt`` adds, ``None`` for none
    :param loss_scale: Factor of the loss with ``amp_dtype="float16"``, ``None`` for none
    :param num_timesteps: Number of timesteps trained so far, for messages
    :param ranks: Ranks of a distributed training, to each of which ``batch_size`` samples of a minibatch belong
    """

    loss: LossConfig
    n_epochs: int = 10
    batch_size: int = 64
    accumulate_grad: int = 1
    normalize_advantage: bool = True
    advantage_norm: AdvantageNorm = "minibatch"
    max_grad_norm: float = 0.5
    target_kl: float | None = None
    max_clip_fraction: float | None = None
    bad_gradients: BadGradients = "raise"
    native_threads: int = 1
    vtrace: bool = False
    vtrace_rho: float = 1.0
    vtrace_c: float = 1.0
    priority_alpha: float = 0.0
    priority_beta: float = 0.4
    priority_segment: int = 16
    discrete_actions: bool = False
    samples_latents: bool = False
    extra_actor_loss: ExtraActorLoss | None = None
    loss_scale: LossScale | None = None
    num_timesteps: int = 0
    verbose: int = 0
    ranks: Ranks = SINGLE

    @property
    def step_size(self) -> int:
        """Number of samples in one step of the optimiser."""
        return self.batch_size * self.accumulate_grad

    @property
    def reads_next(self) -> bool:
        """Whether a loss reads the observations that follow those of the samples."""
        return any(loss.reads_next for loss in self.loss.extra.values())

    @property
    def normalizes_minibatches(self) -> bool:
        """Whether the advantages of each step of the optimiser are normalised separately."""
        return self.normalize_advantage and self.advantage_norm == "minibatch"
