"""The actor of the native engine for some of the environments, in any process."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sb3_ppo_ext.common.type_aliases import StateDict
from sb3_ppo_ext.distributions.base import Sampler
from sb3_ppo_ext.engines.native.layers import Layer, make_network
from sb3_ppo_ext.envs.parallel.share_rollout import ShareActor


class NativeShareActor(ShareActor):
    """
    Computes what :meth:`NativeActor.act` does for some of the environments, bit for bit: the extension module computes the
    outputs for each observation alone, however many there are.

    :param layers: Layers of the actor network
    :param columns: Features that it reads, ``None`` for all
    :param noise: Noise of each step, shape ``(n_steps, n_envs, n_outputs)``
    :param sampler: Function from outputs and noise to samples
    :param sample_shape: Shape of the samples of a step; ``None`` if they have it already
    :param for_env: Function from samples to new arrays of actions within the bounds, which can be pickled
    """

    def __init__(
        self,
        layers: list[Layer],
        columns: slice | None,
        noise: np.ndarray,
        sampler: Sampler,
        sample_shape: tuple[int, ...] | None,
        for_env: Callable[[np.ndarray], np.ndarray],
    ):
        self.layers, self.columns = layers, columns
        self.noise, self.sampler, self.sample_shape, self.for_env = noise, sampler, sample_shape, for_env
        self._load()

    def _load(self) -> None:
        gradients = [tuple(map(np.zeros_like, layer)) for layer in self.layers if isinstance(layer, tuple)]
        self.network = make_network(self.layers, gradients)
        self.network.pack()

    def __getstate__(self) -> StateDict:
        return {name: value for name, value in vars(self).items() if name != "network"}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._load()

    def act(self, observations: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray] | None:
        n = len(observations)
        features = np.asarray(observations, np.float32).reshape(n, -1)
        outputs = np.empty((n, self.noise.shape[2]), np.float32)
        self.network.forward(np.ascontiguousarray(features if self.columns is None else features[:, self.columns]), outputs)
        if not np.isfinite(outputs).all():
            return None
        samples = self.sampler(outputs, self.noise[step])
        if self.sample_shape is not None:
            samples = samples.reshape(self.sample_shape)
        return samples, self.for_env(samples)
