"""
What a script of a user may do in a distributed training. Each scenario returns what the tests look at.

Run it: torchrun --nproc-per-node 2 tests/support/rank_script.py OUTPUT SCENARIO ...
"""

import json
import os
import sys
import traceback
from pathlib import Path

import numpy as np
import torch as th
from stable_baselines3.common.callbacks import BaseCallback, CheckpointCallback, EvalCallback, StopTrainingOnRewardThreshold
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.toys import Brittle, Silent, make_toys

from sb3_ppo_ext import PPOExt

RANK = int(os.environ["RANK"])
SMALL = dict(n_steps=16, batch_size=16, n_epochs=2, device="cpu")


MEMORIES = {
    "MlpTransformerPolicy": dict(context_length=3, n_stacked=1, d_model=4, n_heads=1),
    "MlpLstmPolicy": dict(lstm_hidden_size=4),
}


class Count(BaseCallback):
    """A user's callback, which counts its calls and can end the training."""

    def __init__(self, stop_at=None):
        super().__init__()
        self.stop_at = stop_at

    def _on_step(self):
        return self.n_calls != self.stop_at


def weights(model):
    return th.cat([p.detach().flatten() for p in model.policy.parameters()]).tolist()


def refused(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def plain(folder):
    """An ordinary script."""
    model = PPOExt("MlpPolicy", make_toys(), verbose=1, tensorboard_log=str(folder / "tb"), **SMALL)
    count = Count()
    toys = make_toys(1)
    evaluation = EvalCallback(toys, eval_freq=16, n_eval_episodes=1, best_model_save_path=str(folder / "best"), verbose=0)
    checkpoints = CheckpointCallback(16, str(folder / "checkpoints"))
    model.learn(128, callback=[count, evaluation, checkpoints], progress_bar=False)
    return {
        "weights": weights(model),
        "steps": model.num_timesteps,
        "user": count.n_calls,
        "evaluated": evaluation.n_calls,
        "saved": checkpoints.n_calls,
        "verbose": model.verbose,
        "logged": model.logger.name_to_value.get("rollout/ep_rew_mean"),
        "episodes": len(model.ep_info_buffer),
        "ranks": model.ranks.size,
    }


def seeds(folder):
    """Environments and generators draw different numbers on each rank, with or without seeds."""
    results = {}
    for name in ("seed of the model", "seed of the environments", "seeds of the script"):
        np.random.seed(7)
        th.manual_seed(7)
        env = make_vec_env("CartPole-v1", 2, seed=5 if name == "seed of the environments" else None)
        model = PPOExt("MlpPolicy", env, seed=5 if name == "seed of the model" else None, **SMALL)
        model.learn(64)
        drawn = [float(np.random.random()), float(th.rand(()))]
        buffer = model.rollout_buffer
        observations = np.asarray(buffer.observations).reshape(-1, 4)
        results[name] = [drawn, weights(model), observations[0].tolist()]
    return results


def off(folder):
    """Independent models."""
    model = PPOExt("MlpPolicy", make_toys(), seed=RANK, distributed="off", verbose=0, **SMALL).learn(64)
    return [weights(model), model.num_timesteps]


def differences(folder):
    """Arguments that are not the same on all ranks."""
    cases = {
        "n_envs": lambda: PPOExt("MlpPolicy", make_toys(2 + RANK), **SMALL).learn(64),
        "n_steps": lambda: PPOExt("MlpPolicy", make_toys(), **{**SMALL, "n_steps": 16 + 16 * RANK}).learn(64),
        "total_timesteps": lambda: PPOExt("MlpPolicy", make_toys(), **SMALL).learn(64 + RANK),
        "learning_rate": lambda: PPOExt("MlpPolicy", make_toys(), learning_rate=1e-3 * (1 + RANK), **SMALL).learn(64),
        "policy_kwargs": lambda: PPOExt("MlpPolicy", make_toys(), policy_kwargs={"net_arch": [8 + RANK]}, **SMALL).learn(64),
    }
    return {name: refused(case) for name, case in cases.items()}


def bad_input(folder):
    """Options that ranks cannot share."""
    return {
        "batch_size": refused(lambda: PPOExt("MlpPolicy", make_toys(), **{**SMALL, "batch_size": 15})),
        "accumulate_grad": refused(lambda: PPOExt("MlpPolicy", make_toys(), accumulate_grad=2, priority_alpha=0.5, **SMALL)),
    }


def stop(folder):
    """A callback of one rank ends the training, in the middle of a rollout, with normalised environments."""
    results = {}
    for rank in (0, 1):
        env = VecNormalize(make_toys())
        model = PPOExt("MlpPolicy", env, **SMALL)
        callback = Count(16 + 5 if rank == RANK else None)
        model.learn(10_000, callback=callback)
        stopped = model.num_timesteps
        model.learn(128, reset_num_timesteps=False)
        plain = type(env.obs_rms) is RunningMeanStd
        results[str(rank)] = [
            stopped,
            model.num_timesteps,
            weights(model),
            env.obs_rms.mean.tolist(),
            env.obs_rms.count,
            plain,
        ]
    env = make_vec_env("CartPole-v1", 2)
    stop_early = StopTrainingOnRewardThreshold(reward_threshold=1.0)
    evaluation = EvalCallback(make_vec_env("CartPole-v1", 1), callback_on_new_best=stop_early, eval_freq=8, verbose=0)
    model = PPOExt("MlpPolicy", env, **SMALL).learn(10_000, callback=evaluation)
    results["evaluation"] = model.num_timesteps
    return results


def error(folder):
    """An error of the environment of one rank ends the training on all; the next training works."""
    value = np.nan if RANK == 1 else None
    env = DummyVecEnv([lambda: Brittle(reward=value, at=20)])
    model = PPOExt("MlpPolicy", env, **{**SMALL, "batch_size": 4})
    message = refused(lambda: model.learn(1000))
    after = PPOExt("MlpPolicy", make_toys(), **SMALL).learn(64)
    return [message, weights(after)]


def changed_weights(folder):
    """A callback that changes parameters on rank 0 alone changes those of all ranks."""

    class Change(Silent):
        def _on_rollout_end(self):
            if RANK == 0 and self.n_calls == 16:
                with th.no_grad():
                    next(iter(self.model.policy.parameters())).add_(1.0)

    model = PPOExt("MlpPolicy", make_toys(), **SMALL).learn(128, callback=Change())
    return weights(model)


def memory(folder):
    """History-based policies: transformers and recurrent ones, with options that read whole rollouts."""
    results = {}
    for policy, size in MEMORIES.items():
        for options in ({}, {"vtrace": True, "priority_alpha": 0.5, "kl_coef": 0.1}):
            model = PPOExt(policy, VecNormalize(make_toys()), policy_kwargs=size, **SMALL, **options).learn(128)
            results[f"{policy}, {len(options)} options"] = [weights(model), model.num_timesteps]
    return results


def zips(folder):
    """A model that was saved in a distributed training is loaded and trained on."""
    model = PPOExt("MlpPolicy", make_toys(), kl_coef=0.1, kl_target=0.01, **SMALL).learn(64)
    if RANK == 0:
        model.save(folder / "model")
    model.learn(64, reset_num_timesteps=False)  # rank 1 waits here for rank 0
    loaded = PPOExt.load(folder / "model", make_toys(), device="cpu")
    loaded.learn(64, reset_num_timesteps=False)
    return [weights(loaded), loaded.num_timesteps, loaded.kl_coefficient.value]


def main():
    th.set_num_threads(1)
    folder = Path(sys.argv[1])
    results = {}
    for name in sys.argv[2:]:
        try:
            results[name] = globals()[name](folder)
        except Exception:
            traceback.print_exc()
            raise
    (folder / f"{RANK}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
