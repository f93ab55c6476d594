"""What the ranks of a distributed training exchange after each rollout."""

from __future__ import annotations

import zlib
from collections import deque
from typing import Any

import numpy as np
import torch as th

from sb3_ppo_ext.common.guards import normalizers_of
from sb3_ppo_ext.common.type_aliases import Info
from sb3_ppo_ext.common.validation import described
from sb3_ppo_ext.distributed.ranks import Ranks
from sb3_ppo_ext.distributed.statistics import update_with_nothing

# State of options that adapt during the training
ADAPTIVE = ("advantage_normalizer", "kl_coefficient", "adaptive_lr", "loss_scale")


class DisagreementError(ValueError):
    """The ranks have been given different arguments."""


def check_agreement(ranks: Ranks, settings: dict[str, object]) -> None:
    """
    :param ranks: Ranks of the training
    :param settings: Settings of this rank by name
    :raises ValueError: on all ranks, if one of the settings is not the same on all of them
    """
    found = ranks.gather(settings)
    for name, value in found[0].items():
        for index, other in enumerate(found):
            if other.get(name) != value:
                raise DisagreementError(
                    f"`{name}` is {described(value)} on rank 0 and {described(other.get(name))} on rank {index}: give all "
                    'ranks of a distributed training the same, or `distributed="off"` to train independent models.'
                )


def broadcast_state(model: Any, ranks: Ranks) -> None:
    """
    Give all ranks what the model of rank 0 has learned.

    :param model: Model of this rank
    :param ranks: Ranks of the training
    """
    policy = model.policy
    state = policy.optimizer.state
    learned = [parameter for group in policy.optimizer.param_groups for parameter in group["params"]]
    kept = [{name: value for name, value in state.get(p, {}).items() if th.is_tensor(value)} for p in learned]
    check_agreement(ranks, {"state of the optimizer": [sorted(each) for each in kept]})
    of_optimizer = [each[name] for each in kept for name in sorted(each)]
    ranks.broadcast([*policy.parameters(), *policy.buffers(), *of_optimizer])
    adaptive = {name: getattr(model, name).state_dict() for name in ADAPTIVE if getattr(model, name) is not None}
    for name, value in ranks.gather(adaptive)[0].items():
        if not ranks.is_first and getattr(model, name) is not None:
            getattr(model, name).load_state_dict(value)


class SharedRollout:
    """
    What the ranks exchange about a rollout: whether they continue, and the episodes that have ended.

    :param model: Model of this rank, at the start of the rollout
    """

    def __init__(self, model: Any):
        self.model, self.ranks = model, model.ranks
        self.steps_before = model.num_timesteps
        self.before = list(model.ep_info_buffer), list(model.ep_success_buffer)
        # Step, index of the environment, statistics and success of each episode
        self.episodes: list[tuple[int, int, Any, Any]] = []

    def note(self, infos: list[Info], dones: np.ndarray) -> None:
        """
        Keep the statistics of episodes.

        :param infos: Infos of a step, of length ``n_envs``
        :param dones: Whether an episode has ended in each environment, shape ``(n_envs,)``
        """
        if not dones.any() and not any("episode" in info for info in infos):
            return
        for index in range(len(infos)):
            info = infos[index]
            success = info.get("is_success") if dones[index] else None
            if "episode" in info or success is not None:
                self.episodes.append((self.model.num_timesteps, index, info.get("episode"), success))

    def note_arrays(
        self,
        found: tuple[np.ndarray, ...],
        returns: np.ndarray,
        lengths: np.ndarray,
        successes: np.ndarray | None,
        seconds: float,
    ) -> None:
        """
        Keep the statistics of the episodes of a rollout.

        :param found: Steps and indices of the environments in which episodes have ended
        :param returns: Returns, shape ``(n_steps, n_envs)``
        :param lengths: Lengths, shape ``(n_steps, n_envs)``
        :param successes: Whether they were successful, shape ``(n_steps, n_envs)``, ``None`` if that is not known
        :param seconds: Time since the start
        """
        per_step = self.model.env.num_envs * self.ranks.size
        for step, index in zip(*(part.tolist() for part in found), strict=True):
            info = {"r": float(returns[step, index]), "l": int(lengths[step, index]), "t": seconds}
            success = None if successes is None else bool(successes[step, index])
            self.episodes.append((self.steps_before + (step + 1) * per_step, index, info, success))

    def finish(self, go_on: bool, n_steps: int) -> bool:
        """
        :param go_on: Whether no callback of this rank has ended the training
        :param n_steps: Number of steps of a whole rollout
        :return: Whether no callback of any rank has
        """
        model, ranks = self.model, self.ranks
        n_made = (model.num_timesteps - self.steps_before) // (model.env.num_envs * ranks.size)
        update_with_nothing(normalizers_of(model), n_steps - n_made)
        checksum = zlib.crc32(th.cat([p.detach().reshape(-1).cpu() for p in model.policy.parameters()]).numpy().tobytes())
        found = ranks.gather((go_on, model.num_timesteps, self.episodes, checksum))
        model.num_timesteps = min(each[1] for each in found)
        episodes = [(step, rank, *rest) for rank, each in enumerate(found) for step, *rest in each[2]]
        episodes.sort(key=lambda each: each[:3])
        infos = [*self.before[0], *(info for *_, info, _ in episodes if info is not None)]
        successes = [*self.before[1], *(success for *_, success in episodes if success is not None)]
        model.ep_info_buffer = deque(infos, maxlen=model._stats_window_size)
        model.ep_success_buffer = deque(successes, maxlen=model._stats_window_size)
        if any(each[3] != checksum for each in found):
            broadcast_state(model, ranks)
        return all(each[0] for each in found)
