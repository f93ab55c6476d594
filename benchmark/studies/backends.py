"""
Whether PPOExt's native backend learns as SB3's PPO does: returns over seeds, and the p-value of a permutation test of the
difference of the means (the fraction of random divisions of all returns into two halves whose means differ at least as much).

Three tasks with simple hyperparameters. The curves show the training returns; the last row of a run is the deterministic
policy.

Run it: python benchmark/studies/backends.py (about 15 minutes on two cores; it needs MuJoCo)
It writes benchmark/studies/backends.csv.gz and benchmark/studies/backends.svg.
"""

from typing import Any

import numpy as np
from common import (
    Job,
    Row,
    grid_of_axes,
    legend_below,
    mean_and_std,
    parse_arguments,
    per_seed,
    plot_curve,
    print_table,
    run_grid,
    save_plot,
    select,
    write_csv,
)
from matplotlib.figure import Figure
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.plot_run import COLORS

ALGORITHMS: dict[str, tuple[Any, dict[str, Any]]] = {"SB3": (PPO, {}), "native": (PPOExt, {"backend": "native"})}
EVALUATIONS = 20
# Environment: number of environments, hyperparameters, whether observations and rewards are normalised
TASKS: dict[str, tuple[int, dict[str, Any], bool]] = {
    "CartPole-v1": (8, dict(n_steps=32, batch_size=256, n_epochs=20, gamma=0.98, gae_lambda=0.8, learning_rate=1e-3), False),
    "Pendulum-v1": (4, dict(n_steps=1024, gamma=0.9, learning_rate=1e-3), False),
    "HalfCheetah-v5": (1, dict(), True),
}


class Curve(BaseCallback):
    """Records the mean return of the last episodes, about twenty times during the training."""

    def __init__(self, timesteps: int):
        super().__init__()
        self.every, self.next, self.rows = timesteps / 20, 0.0, list[Row]()

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        episodes = self.model.ep_info_buffer
        if self.num_timesteps >= self.next and episodes:
            self.next += self.every
            self.rows.append({"timesteps": self.num_timesteps, "return": float(np.mean([e["r"] for e in episodes]))})


def make_env(task: str, n_envs: int, seed: int, normalize: bool) -> VecEnv:
    env = make_vec_env(task, n_envs, seed=seed)
    return VecNormalize(env) if normalize else env


def run(job: Job) -> list[Row]:
    task, (algorithm, options) = job.settings["task"], ALGORITHMS[job.settings["algorithm"]]
    n_envs, hyperparameters, normalize = TASKS[task]
    env = make_env(task, n_envs, job.seed, normalize)
    model = algorithm("MlpPolicy", env, seed=job.seed, device="cpu", stats_window_size=20, **hyperparameters, **options)
    curve = Curve(job.timesteps)
    model.learn(job.timesteps, callback=curve)
    if isinstance(env, VecNormalize):
        env.training = env.norm_reward = False
    returns, _ = evaluate_policy(model, env, EVALUATIONS, return_episode_rewards=True)
    return [*curve.rows, {"timesteps": model.num_timesteps, "evaluation": float(np.mean(returns))}]


def p_value(one: np.ndarray, other: np.ndarray, n: int = 20_000) -> float:
    """The two-sided p-value of the hypothesis that both samples are from the same distribution."""
    rng, both = np.random.default_rng(0), np.concatenate([one, other])
    orders = rng.permuted(np.tile(both, (n, 1)), axis=1)
    differences = np.abs(orders[:, : len(one)].mean(axis=1) - orders[:, len(one) :].mean(axis=1))
    return float(np.mean(differences >= abs(one.mean() - other.mean()) - 1e-9))


def report(rows: list[Row]) -> None:
    lines = []
    for task in TASKS:
        for column in ("evaluation", "return"):
            kinds = []
            for algorithm in ALGORITHMS:
                kind = [row for row in select(rows, task=task, algorithm=algorithm) if column in row]
                # The second half of the training
                half = max(row["timesteps"] for row in kind) / 2 if column == "return" else 0
                kinds.append(per_seed(kind, column, start=half))
            name = "deterministic, at the end" if column == "evaluation" else "training, second half"
            lines.append([task, name, *(mean_and_std(kind, 1) for kind in kinds), f"{p_value(kinds[0], kinds[1]):.2f}"])
    print_table("return, mean ± std over seeds", ["task", "return", *ALGORITHMS, "p"], lines)


def plot(rows: list[Row]) -> Figure:
    figure, axes = grid_of_axes(len(TASKS))
    for ax, task in zip(axes, TASKS, strict=True):
        for algorithm in ALGORITHMS:
            kind = [row for row in select(rows, task=task, algorithm=algorithm) if "return" in row]
            plot_curve(ax, kind, "return", label=algorithm, color=COLORS[algorithm])
        ax.set(title=task, xlabel="1000 timesteps", ylabel="return of the training")
    legend_below(figure, axes[0])
    return figure


def main() -> None:
    arguments = parse_arguments(__doc__, timesteps=102_400, seeds=10)
    settings = [{"task": task, "algorithm": algorithm} for task in TASKS for algorithm in ALGORITHMS]
    rows = run_grid(run, settings, arguments)
    write_csv(arguments.out / "backends.csv.gz", rows)
    save_plot(plot(rows), arguments.out / "backends.svg")
    report(rows)


if __name__ == "__main__":
    main()
