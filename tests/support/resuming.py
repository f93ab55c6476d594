"""A training script that is interrupted and run again, as users write it."""

import os
import warnings

import numpy as np
import pandas as pd
import torch as th
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ppo_ext import FastDummyVecEnv, PPOExt, RNDReward, TrainingCheckpoint
from sb3_ppo_ext.envs.rnd_reward import without_rewards_of_rnd

TOTAL = 256
OPTIONS = dict(n_steps=32, batch_size=32, n_epochs=2, seed=3, device="cpu")


class Interruption(BaseException):
    """What ends a script, such as a signal."""


class Interrupt(BaseCallback):
    """Ends the script in the middle of a rollout."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def _on_step(self):
        if self.num_timesteps >= self.at:
            raise Interruption
        return True


def make_env(folder, env_id, n_envs, normalize, wrapper=None):
    kwargs = dict(vec_env_cls=FastDummyVecEnv, monitor_dir=str(folder / "monitor"), env_kwargs={"max_episode_steps": 45})
    env = make_vec_env(env_id, n_envs, seed=7, **kwargs)
    env = env if wrapper is None else wrapper(env)
    return VecNormalize(env) if normalize else env


def script(
    folder, interrupt_at=None, env_id="Pendulum-v1", n_envs=2, normalize=True, wrapper=None, policy="MlpPolicy", **options
):
    """The model and callbacks at the end of a script that resumes if there is a checkpoint."""
    env, checkpoints = make_env(folder, env_id, n_envs, normalize, wrapper), folder / "checkpoints"
    resumes = os.path.exists(checkpoints)
    model = PPOExt.resume(checkpoints, env) if resumes else PPOExt(policy, env, **{**OPTIONS, **options})
    model.set_logger(configure(str(folder / "log"), ["csv", "json"]))
    evaluation = EvalCallback(
        without_rewards_of_rnd(make_env(folder / "evaluation", env_id, 1, normalize, wrapper)),
        eval_freq=50,
        n_eval_episodes=1,
        log_path=str(folder / "evaluations"),
        best_model_save_path=str(folder / "best"),
        verbose=0,
    )
    callbacks = [TrainingCheckpoint(60, checkpoints), evaluation]
    if interrupt_at is not None:
        callbacks.append(Interrupt(interrupt_at))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Training and eval env are not of the same type")
        model.learn(TOTAL, callback=callbacks)
    return model, callbacks


def interrupted_script(folder, times=(110, 170), **kwargs):
    """The same at the end of a script that was interrupted and run again."""
    for time in times:
        try:
            script(folder, interrupt_at=time, **kwargs)
        except Interruption:
            continue
        raise AssertionError("The script was not interrupted.")
    return script(folder, **kwargs)


def everything(folder, model, callbacks):
    """What must be equal after two runs of the script, by name."""
    log = pd.read_csv(folder / "log" / "progress.csv")
    timeless = [name for name in log if not any(word in name for word in ("seconds", "fps", "elapsed"))]
    found = {"log": log[sorted(timeless)].to_numpy(), "lines": np.array(len(_lines(folder / "log" / "progress.json")))}
    found["iterations"] = log["time/iterations"].dropna().to_numpy()
    for number in range(model.n_envs):
        monitor = pd.read_csv(folder / "monitor" / f"{number}.monitor.csv", skiprows=1)
        found[f"monitor {number}"] = monitor[["r", "l"]].to_numpy()
    evaluation = pd.read_csv(folder / "evaluation" / "monitor" / "0.monitor.csv", skiprows=1)
    found["monitor of the evaluation"] = evaluation[["r", "l"]].to_numpy()
    found |= dict(np.load(folder / "evaluations" / "evaluations.npz"))
    found["best"] = np.array(callbacks[1].best_mean_reward)
    found["generators"] = np.concatenate([th.get_rng_state().numpy(), np.random.get_state()[1].view(np.uint8)])
    found["last observations"] = model._last_obs
    found |= {name: tensor.numpy() for name, tensor in model.policy.state_dict().items()}
    found |= {f"optimizer {name}": value for name, value in _flat(model.policy.optimizer.state_dict()["state"])}
    for name in ("advantage_normalizer", "kl_coefficient", "adaptive_lr"):
        if getattr(model, name) is not None:
            found |= {f"{name} {key}": value for key, value in _flat(getattr(model, name).state_dict())}
    normalization = model.get_vec_normalize_env()
    if isinstance(rnd := getattr(normalization, "venv", None), RNDReward):
        found |= {"sums of RND": rnd.returns, "seen by RND": np.array(rnd.seen)}
        found |= {f"predictor {name}": tensor.numpy() for name, tensor in rnd.predictor.state_dict().items()}
        found |= {f"RND {name}": value for name, value in _flat(rnd.optimizer.state_dict()["state"])}
    if normalization is not None:
        found |= {"mean": normalization.obs_rms.mean, "variance of returns": normalization.ret_rms.var}
    return found


def _lines(path):
    return path.read_text().splitlines()


def _flat(values):
    for key, value in values.items():
        if isinstance(value, dict):
            yield from ((f"{key} {name}", part) for name, part in _flat(value))
        else:
            yield str(key), np.asarray(value)


def different(one, other):
    """Names of what is not equal to the bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not np.array_equal(one[name], other[name], equal_nan=True)]
