"""The actor of the native engine for some of the environments, in any process."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from sb3_ppo_ext.common.hybrid_actions import is_hybrid
from sb3_ppo_ext.common.namespaces import namespace
from sb3_ppo_ext.common.type_aliases import Arrays, JaxTree
from sb3_ppo_ext.distributions.base import Sampler
from sb3_ppo_ext.distributions.masked import INVALID
from sb3_ppo_ext.engines.native.inputs import Inputs
from sb3_ppo_ext.engines.native.jax_network import Kind, forward, split_layers
from sb3_ppo_ext.engines.native.layers import Forward
from sb3_ppo_ext.engines.native.policy import invalid_choices, mask
from sb3_ppo_ext.envs.parallel.share_rollout import JaxActor, ShareActor
from sb3_ppo_ext.policies.actor_critic import ActionsForEnv


@dataclass
class NativeShareActor(ShareActor):
    """
    Computes what :meth:`NativeActor.act` does for some of the environments, bit for bit: the extension module computes the
    outputs for each observation alone, however many there are.

    :param inputs: What the actor network reads of the observations
    :param network: Actor network
    :param mask_key: Key of the masks in the observations, ``None`` for none
    :param noise: Noise, a sequence of arrays whose first dimension is over environments
    :param n_held: Number of steps in which each element of the noise is used
    :param sampler: Function from outputs and noise to samples
    :param sample_shape: Shape of the samples of a step; ``None`` if they have it already
    :param for_env: Function from samples to new actions within the bounds, which can be pickled
    """

    inputs: Inputs
    network: Forward
    mask_key: str | None
    noise: Arrays
    n_held: int
    sampler: Sampler
    sample_shape: tuple[int, ...] | None
    for_env: ActionsForEnv

    def act(self, observations: Arrays, step: int) -> tuple[np.ndarray, Arrays] | None:
        outputs = self.network(self.inputs(observations))
        outputs = mask(outputs, invalid_choices(observations, self.mask_key, self.network.n_outputs))
        samples = self.sampler(outputs, self.noise[step // self.n_held])
        if not (np.isfinite(outputs).all() and np.isfinite(samples).all()):
            return None
        if self.sample_shape is not None:
            samples = samples.reshape(self.sample_shape)
        return samples, self.for_env(samples)

    def in_jax(self) -> JaxActor | None:
        if is_hybrid(self.for_env.space):
            return None
        kinds, parameters = split_layers(self.network.values)
        what = (self.inputs, kinds, self.network.n_latents, self.network.columns, self.mask_key)
        key = pickle.dumps((*what, self.sampler, self.sample_shape, self.for_env.within_bounds))
        # Without the noise, which the compiled function would keep
        act = partial(replace(self, noise=None)._act_in_jax, kinds)
        return JaxActor(act, key, parameters, self.noise, self.n_held)

    def _act_in_jax(
        self, kinds: Sequence[Kind], parameters: JaxTree, noise: JaxTree, observations: JaxTree
    ) -> tuple[JaxTree, JaxTree, JaxTree]:
        xp, features, columns = namespace(noise), self.inputs(observations), self.network.columns
        outputs, latents = forward(kinds, parameters, features if columns is None else features[:, columns])
        if self.mask_key is not None:
            masks = observations[self.mask_key].reshape(outputs.shape)
            outputs = xp.where(masks, outputs, np.float32(INVALID))
        if self.network.n_latents:
            outputs = xp.concatenate([outputs, latents], axis=1)
        samples = self.sampler(outputs, noise)
        is_right = xp.isfinite(outputs).all() & xp.isfinite(samples).all()
        if self.sample_shape is not None:
            samples = samples.reshape(self.sample_shape)
        return samples, self.for_env.within_bounds(samples), is_right
