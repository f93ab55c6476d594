"""
Train ``ppo_ext`` on Pendulum-v1 through RL Zoo's command line, evaluate it and plot its learning curve: ``make demo``.

The final policy is evaluated over 20 deterministic episodes, as the Zoo does for the return that it publishes for PPO.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import matplotlib as mpl
import numpy as np
from rl_zoo3.utils import get_latest_run_id
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import load_results

from sb3_ppo_ext import PPOExt

mpl.use("agg")
import matplotlib.pyplot as plt

ENV_ID = "Pendulum-v1"
PUBLISHED = "-172 ± 104"


def train(folder: Path, seed: int) -> Path:
    """Run the Zoo's command and return the folder of the run."""
    command = [sys.executable, "-m", "rl_zoo3.train", "--algo", "ppo_ext", "--env", ENV_ID, "--seed", str(seed)]
    command += ["--progress", "--verbose", "0", "--log-folder", str(folder)]
    print("$ rl_zoo3 train", *command[3:], flush=True)
    subprocess.run(command, check=True)
    logs = folder / "ppo_ext"
    return logs / f"{ENV_ID}_{get_latest_run_id(str(logs), ENV_ID)}"


def evaluate(run: Path, n_episodes: int = 20) -> tuple[float, float]:
    """Return the mean and the standard deviation of the returns of the final policy."""
    model = PPOExt.load(run / f"{ENV_ID}.zip")
    mean, std = evaluate_policy(model, make_vec_env(ENV_ID, seed=0), n_eval_episodes=n_episodes)
    return float(mean), float(std)  # type: ignore[arg-type]


def plot(run: Path, path: Path, window: int = 20) -> None:
    """Draw the returns of the training episodes and their moving average."""
    episodes = load_results(str(run))
    timesteps, returns = episodes["l"].cumsum(), episodes["r"]
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    axes.plot(timesteps, returns, ".", markersize=3, alpha=0.4, label="episode")
    smooth = np.convolve(returns, np.ones(window) / window, mode="valid")
    axes.plot(timesteps[window - 1 :], smooth, label=f"mean of {window}")
    axes.set(xlabel="timesteps", ylabel="return", title=f"ppo_ext on {ENV_ID}")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=Path("demo"), help="folder for the run and the plot (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    start = time.perf_counter()
    run = train(arguments.folder, arguments.seed)
    minutes, seconds = divmod(round(time.perf_counter() - start), 60)
    mean, std = evaluate(run)
    curve = (arguments.folder / "learning_curve.png").resolve()
    plot(run, curve)

    print(f"\nTrained in {minutes} min {seconds} s.")
    print(f"Mean reward over 20 episodes: {mean:.0f} ± {std:.0f} (RL Zoo publishes {PUBLISHED} for PPO)")
    print(f"Learning curve: {curve}")


if __name__ == "__main__":
    main()
