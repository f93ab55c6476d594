"""
Compile losses and policies for CUDA without a card, and say what became of them:
`PYTHONPATH=tests python -m support.pretended_cuda.compiled_cases OUT.json [CASE ...]`.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

TRANSFORMER = dict(context_length=6, d_model=16, n_heads=2)
#: Options of a model by name; "spaces" are those of its environment
CASES: dict[str, dict[str, Any]] = {
    "MLP": {},
    "MLP, remainder": dict(batch_size=12),
    "MLP, simba": dict(policy_kwargs=dict(net_type="simba", net_arch=[16])),
    "MLP, layer norm": dict(policy_kwargs=dict(net_type="layer_norm")),
    "MLP, mean_tanh": dict(policy_kwargs=dict(mean_tanh=True)),
    "CNN": dict(policy="CnnPolicy", spaces="images"),
    "dict": dict(policy="MultiInputPolicy", spaces="dict"),
    "transformer": dict(policy="MlpTransformerPolicy", policy_kwargs=dict(TRANSFORMER, use_last_action=True)),
    "transformer, long": dict(policy="MlpTransformerPolicy", policy_kwargs=dict(TRANSFORMER, context_length=23), vtrace=True),
    "transformer, images": dict(policy="CnnTransformerPolicy", spaces="images", policy_kwargs=TRANSFORMER),
    "transformer, dict": dict(policy="MultiInputTransformerPolicy", spaces="dict", policy_kwargs=TRANSFORMER),
    "Beta": dict(action_dist="beta", kl_coef=0.5, clip_range_vf=0.1, ent_coef=0.1),
    "squashed Gaussian": dict(action_dist="squashed_gaussian", bounds_coef=0.1, kl_coef=0.1),
    "categorical": dict(spaces="discrete", kl_coef=0.1),
    "multi-categorical": dict(spaces="multi-discrete", kl_coef=0.1),
    "Bernoulli": dict(spaces="multi-binary", kl_coef=0.1),
    "gSDE": dict(use_sde=True),
    "SPO": dict(surrogate="spo", bounds_coef=0.1, bounds_limit=0.0, priority_alpha=0.5, normalize_value=True),
    "dual clip": dict(dual_clip=3.0, clip_range_vf=0.1, vf_clip_mode="max", vtrace=True, advantage_norm="ema"),
    "guards": dict(max_clip_fraction=0.5, target_kl=0.1, bad_gradients="skip", accumulate_grad=2),
    "AdamW, own critic": dict(optimizer="adamw", weight_decay=0.1, critic_learning_rate=1e-3),
    "Muon": dict(optimizer="muon", clip_range="lin_0.2", ent_coef="lin_0.01"),
}


def main() -> None:
    from support.pretended_cuda import device

    assert device.install(), "there is no C++ compiler"
    from support.pretended_cuda import triton_driver  # which imports PyTorch

    triton_driver.install()
    out, *names = sys.argv[1:]
    found = {}
    for name in names or CASES:
        start = time.perf_counter()
        found[name] = outcome(**CASES[name]) | {"seconds": round(time.perf_counter() - start, 1)}
        print(name, found[name], flush=True)
        Path(out).write_text(json.dumps(found, indent=1))


def outcome(spaces: str = "vector", policy: str = "MlpPolicy", **options: Any) -> dict[str, Any]:
    """
    :param spaces: Which spaces the environment has
    :param policy: Name of the policy
    :param options: Options of the model
    :return: Graphs of its loss and of its policy, and what was said about them
    """
    from support.pretended_cuda import triton_driver

    triton_driver.graphs.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            error = _compile(spaces, policy, options)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"[:2000]
    said = [str(warning.message) for warning in caught]
    return {
        "graphs": [graph._asdict() for graph in triton_driver.graphs],
        "eager": [text for text in said if "cannot trace" in text],
        "error": error,
    }


def _compile(spaces: str, policy: str, options: dict[str, Any]) -> str | None:
    import torch as th
    from gymnasium.spaces import Discrete, MultiBinary, MultiDiscrete
    from support.engines import updated
    from support.toys import DICT, IMAGE, make_toys

    from sb3_ppo_ext import PPOExt
    from sb3_ppo_ext.engines.torch_engine import CompiledEngine

    kinds: dict[str, dict[str, Any]] = {
        "vector": {},
        "images": dict(observation_space=IMAGE),
        "dict": dict(observation_space=DICT),
        "discrete": dict(action_space=Discrete(4)),
        "multi-discrete": dict(action_space=MultiDiscrete([3, 2])),
        "multi-binary": dict(action_space=MultiBinary(3)),
    }
    small: dict[str, Any] = {**dict(n_steps=16, batch_size=16, n_epochs=2, seed=0), **options}
    # The rollout is collected eagerly, since the kernels compute nothing.
    model: Any = PPOExt(policy, make_toys(**kinds[spaces]), device="cuda", backend="device", **small).learn(32)
    updated(model, "compile")
    if "Transformer" not in policy:  # which acts with its cache
        observations, _ = model.policy.obs_to_tensor(model._last_obs)
        with th.no_grad():
            CompiledEngine(model.policy).make_act()(observations)
    return None


if __name__ == "__main__":
    main()
