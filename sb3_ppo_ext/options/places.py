"""Where arguments belong that were given in another place."""

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


def place_of(name: str) -> str | None:
    """
    :param name: Name of an argument that a constructor or dictionary does not take
    :return: Where it belongs, the end of a message; ``None`` if it is not known
    """
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
        "goes into `policy_kwargs=dict(optimizer_kwargs=...)`": {"betas", "eps", "momentum", "nesterov", "amsgrad"},
    }
    return {place: (names or set()) - made for place, names in places.items()}
