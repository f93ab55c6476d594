"""The statistics of ``VecNormalize`` as plain data, which can be read without unpickling."""

from typing import Any

from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from sb3_ppo_ext.common.plain_data import from_plain, to_plain
from sb3_ppo_ext.common.type_aliases import StateDict
from sb3_ppo_ext.envs.tensors.tensor_vec_env import TensorVecEnv
from sb3_ppo_ext.envs.tensors.tensor_vec_normalize import TensorVecNormalize

SETTINGS = ("norm_obs", "norm_obs_keys", "clip_obs", "clip_reward", "gamma", "epsilon")


def statistics_of(normalization: VecNormalize) -> Any:
    """
    :param normalization: Normalisation of observations and rewards
    :return: Its settings and statistics, for ``json.dumps``
    """
    state = normalization.__getstate__()
    settings = {name: state[name] for name in SETTINGS}
    statistics = {name: _plain(state[name]) for name in ("obs_rms", "ret_rms") if name in state}
    return to_plain({**settings, **statistics})


def normalized(env: VecEnv, plain: Any) -> VecNormalize:
    """
    :param env: Vectorised environment
    :param plain: Result of :func:`statistics_of`
    :return: The environment with this normalisation of observations. The statistics stay as they are, and rewards are not
        normalised, until ``training`` and ``norm_reward`` are set
    :raises Exception: of any type, if it is not such a result; but nothing of it is executed
    """
    saved = from_plain(plain)
    settings = {name: saved[name] for name in SETTINGS}
    kind = TensorVecNormalize if isinstance(env, TensorVecEnv) else VecNormalize
    made = kind(env, training=False, norm_reward=False, **settings)
    for name in saved.keys() & {"obs_rms", "ret_rms"}:
        setattr(made, name, _statistics(saved[name]))
    return made


def _plain(statistics: RunningMeanStd) -> dict[str, object]:
    if isinstance(statistics, dict):
        return {"keys": {key: _plain(part) for key, part in statistics.items()}}
    return {"mean": statistics.mean, "var": statistics.var, "count": statistics.count}


def _statistics(saved: StateDict) -> Any:
    if "keys" in saved:
        return {key: _statistics(part) for key, part in saved["keys"].items()}
    made = RunningMeanStd(shape=saved["mean"].shape)
    made.mean, made.var, made.count = saved["mean"], saved["var"], saved["count"]
    return made
