"""
A script of a user that goes on after torchrun has started it again: it writes what it has learned at the end.

Run it: torchrun --nproc-per-node 2 --max-restarts 20 tests/support/rank_training.py FOLDER
"""

import json
import os
import sys
from pathlib import Path

import torch as th
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ppo_ext import FastDummyVecEnv, PPOExt, TrainingCheckpoint

folder = Path(sys.argv[1])
th.set_num_threads(1)
env = VecNormalize(make_vec_env("Pendulum-v1", 4, vec_env_cls=FastDummyVecEnv))
options = dict(n_steps=64, batch_size=64, advantage_norm="ema", target_kl=0.05, seed=1, device="cpu")
try:
    model = PPOExt.resume(folder / "checkpoints", env, device="cpu")
    (folder / f"resumed_{os.getpid()}").touch()
except FileNotFoundError:
    model = PPOExt("MlpPolicy", env, **options)
model.learn(int(sys.argv[2]), callback=TrainingCheckpoint(128, folder / "checkpoints"))
results = {
    "parameters": th.cat([p.detach().flatten() for p in model.policy.parameters()]).tolist(),
    "num_timesteps": model.num_timesteps,
    "n_updates": model._n_updates,
    "episodes": [[float(episode["r"]), int(episode["l"])] for episode in model.ep_info_buffer],
    "statistics": [env.obs_rms.mean.tolist(), float(env.ret_rms.var), float(env.ret_rms.count)],
    "observations": model._last_obs.tolist(),
}
(folder / f"{os.environ['RANK']}.json").write_text(json.dumps(results))
