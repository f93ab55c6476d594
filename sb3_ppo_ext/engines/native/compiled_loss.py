"""PPO's loss and its slope in the extension module, which computes what the slopes in ``update.losses`` do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from sb3_ppo_ext.distributions import NumpyDistribution, bounded_part
from sb3_ppo_ext.engines.native import extension
from sb3_ppo_ext.engines.native.epoch import NativeMinibatches
from sb3_ppo_ext.update.losses import SPO_MIN_RANGE, LossConfig, Penalty, bounds_penalty, kl_penalty, middle_and_half

# Surrogates that the extension module knows, and whether each is SPO's
IS_SPO = {"clip": False, "spo": True}
# Penalties that it knows, and the families for which it does
PENALTY_FAMILIES: dict[Any, tuple[str, ...]] = {
    kl_penalty: ("gaussian", "squashed_gaussian", "beta", "categorical", "bernoulli"),
    bounds_penalty: ("gaussian", "squashed_gaussian", "state_dependent_noise"),
}


def compiled_loss(
    distribution: NumpyDistribution, minibatches: NativeMinibatches, config: LossConfig, penalties: Mapping[str, Penalty]
) -> Any:
    """
    :param distribution: Action distribution that the outputs of the actor parametrise
    :param minibatches: Minibatches of an epoch, in which measurements are written
    :param config: Options of the loss
    :param penalties: Active penalties, by name
    :return: Loss of the extension module for these minibatches; ``None`` if it does not know all of it
    """
    family, options = distribution.compiled(), config
    if family is None or options.surrogate not in IS_SPO:
        return None
    if any(family[0] not in PENALTY_FAMILIES.get(penalty.value, ()) for penalty in penalties.values()):
        return None
    m, samples = minibatches, minibatches.samples
    m.measure(penalties, describes=bounded_part(distribution.distribution) is not None)
    kl_coef, bounds_coef = (float(options.penalties[name]) if name in penalties else 0.0 for name in ("kl", "bounds_loss"))
    bounds = () if options.action_bounds is None else middle_and_half(*options.action_bounds)
    weights = None if m.weights is None else np.asarray(m.weights, np.float32)
    known = (samples.actions.reshape(len(m.order), -1), samples.log_probs, samples.advantages, samples.values, samples.returns)
    clip_range: Any = options.clip_range
    limit: Any = options.clip_range_vf
    scale: Any = options.value_scale
    vf_coef, ent_coef = float(options.vf_coef), float(options.ent_coef)
    return extension.module.Loss(
        *family,
        distribution.parameter,
        distribution.d_log_std,
        (
            *(*known, weights, samples.old if kl_coef else None),
            *(m.log_ratios, m.ratios, m.objectives, m.errors, m.entropies),
            *(m.rows, m.penalized.get("kl"), m.penalized.get("bounds_loss")),
        ),
        tuple(part.numpy() for part in bounds),
        is_spo=IS_SPO[options.surrogate],
        is_max=options.vf_clip_mode == "max",
        clip_range=max(clip_range, SPO_MIN_RANGE) if IS_SPO[options.surrogate] else clip_range,
        dual_clip=math.inf if options.dual_clip is None else options.dual_clip,
        value_limit=math.inf if limit is None else limit,
        value_scale=1.0 if scale is None else scale,
        vf_coef=vf_coef,
        ent_coef=ent_coef,
        kl_coef=kl_coef,
        bounds_coef=bounds_coef,
        bounds_limit=options.bounds_limit,
        max_concentration=getattr(distribution.distribution, "max_concentration", math.inf),
        use_expln=getattr(distribution.distribution, "use_expln", False),
        epsilon=getattr(distribution.distribution, "epsilon", 0.0),
    )
