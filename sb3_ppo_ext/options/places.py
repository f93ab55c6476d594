"""Where arguments belong that were given in another place or under another name."""

from collections.abc import Mapping
from functools import cache

from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env

from sb3_ppo_ext.common.validation import keywords_of
from sb3_ppo_ext.memory.policies import MlpTransformerPolicy
from sb3_ppo_ext.memory.recurrent_policies import MlpLstmPolicy
from sb3_ppo_ext.policies import MlpPolicy
from sb3_ppo_ext.update.extra_losses import EXTRA_LOSSES

OF_ENTRIES = {"n_timesteps", "frame_stack", "env_wrapper", "vec_env_wrapper", "staggered_start"}
POLICIES: Mapping[str, type] = {
    "": MlpPolicy,
    ' of a transformer policy, such as `policy="MlpTransformerPolicy"`': MlpTransformerPolicy,
    ' of a recurrent policy, such as `policy="MlpLstmPolicy"`': MlpLstmPolicy,
}
# Options under the names of other libraries, see docs/coming_from.md
NAMES_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("num_steps", "num_steps_per_env", "horizon_length", "horizon"), "n_steps"),
    **dict.fromkeys(("update_epochs", "num_learning_epochs", "mini_epochs", "num_mini_epochs"), "n_epochs"),
    **dict.fromkeys(("clip_coef", "clip_param", "e_clip"), "clip_range"),
    **dict.fromkeys(("clip_vloss", "use_clipped_value_loss", "clip_value", "vf_clip_coef"), "clip_range_vf"),
    **dict.fromkeys(("lam", "tau"), "gae_lambda"),
    **dict.fromkeys(("value_loss_coef", "critic_coef"), "vf_coef"),
    **dict.fromkeys(("anneal_lr", "lr_schedule"), "lr_decay"),
    **dict.fromkeys(("desired_kl", "kl_threshold"), "adaptive_lr_kl"),
    "accumulate_grad_batches": "accumulate_grad",
    "min_lr_ratio": "lr_min_fraction",
    "bounds_loss_coef": "bounds_coef",
    "entropy_coef": "ent_coef",
    "gradient_clip_val": "max_grad_norm",
    "lr": "learning_rate",
    "minibatch_size": "batch_size",
    "norm_adv": "normalize_advantage",
    "normalize_input": "normalize_obs",
}


def place_of(name: str) -> str | None:
    """
    :param name: Name of an argument that a constructor or dictionary does not take
    :return: Where it belongs, or its name here, the end of a message; ``None`` if it is not known
    """
    if name in NAMES_ELSEWHERE:
        return f"its name here is `{NAMES_ELSEWHERE[name]}`"
    return next((f"it {place}" for place, names in _places().items() if name in names), None)


@cache
def _places() -> dict[str, set[str]]:
    """Names of arguments by their place, of which the first counts."""
    made = {"self", "observation_space", "action_space", "lr_schedule", "lr", "params"}
    of_policies = {f"goes into `policy_kwargs`{which}": keywords_of(policy) for which, policy in POLICIES.items()}
    places = {
        **of_policies,
        "goes into `auxiliary_losses`": set(EXTRA_LOSSES),
        "is an argument of `learn`": keywords_of(PPO.learn),
        "is a key of RL Zoo's entries": OF_ENTRIES,
        "is an argument of `make_vec_env`, which makes the environments": keywords_of(make_vec_env),
        "is `n_envs` of `make_vec_env`, which makes the environments": {"num_envs", "num_actors"},
        "is `batch_size` here, the number of samples of a minibatch": {"num_minibatches", "num_mini_batches"},
        "goes into `policy_kwargs=dict(optimizer_kwargs=...)`": {"betas", "eps", "momentum", "nesterov", "amsgrad"},
    }
    return {place: (names or set()) - made for place, names in places.items()}
