"""SB3's classes that write files during a training run of RL Zoo, with files that are replaced at once."""

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import SupportsIndex

from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from sb3_ppo_ext.common.atomic_files import written_atomically


class AtomicVecNormalize(VecNormalize):
    """SB3's ``VecNormalize``, which is saved atomically, and pickled as SB3's class, so that anyone can load the file."""

    def save(self, save_path: str) -> None:
        """
        Save current VecNormalize object with all running statistics and settings (e.g. clip_obs)

        :param save_path: The path to save to
        """
        with written_atomically(save_path) as file:
            pickle.dump(self, file)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        return object.__new__, (VecNormalize,), self.__getstate__()


# Checkpoints refer to the state of an object by the name of its class, and are to fit SB3's class as well.
AtomicVecNormalize.__module__, AtomicVecNormalize.__qualname__ = VecNormalize.__module__, VecNormalize.__qualname__


class AtomicEvalCallback(EvalCallback):
    """SB3's ``EvalCallback``, which replaces ``evaluations.npz`` at once."""

    def _on_step(self) -> bool:
        path = self.log_path
        if path is None:
            return super()._on_step()
        written, temporary = Path(f"{path}.npz"), Path(f"{path}.tmp.npz")
        self.log_path = f"{path}.tmp"
        try:
            goes_on = super()._on_step()
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            self.log_path = path
        if temporary.exists():
            temporary.replace(written)
        return goes_on


_REPLACED: dict[type, type] = {VecNormalize: AtomicVecNormalize, EvalCallback: AtomicEvalCallback}


def make_atomic(objects: Iterable[VecEnv | BaseCallback]) -> None:
    """
    :param objects: Environments and callbacks that the Zoo has made; those of SB3's classes become objects of ours
    """
    for each in objects:
        each.__class__ = _REPLACED.get(type(each), type(each))
