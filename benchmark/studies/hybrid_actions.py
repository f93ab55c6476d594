"""
What a task with hybrid actions gains from being trained as it is, compared with the usual work-arounds.

One of 3 or 12 team mates is free, at a distance that the player sees. A pass to them is worth up to 1, the less the more its
power misses the distance; a pass to another mate is worth nothing. An episode has 10 passes. Each task is trained with

- a dictionary of a `Discrete` and a `Box`, with a Gaussian or a Beta distribution ("hybrid"),
- a single `Box`, whose largest number chooses the team mate, while the last one is the power ("box"), and
- a `MultiDiscrete` of the team mate and 11 levels of power ("levels").

Run it: python benchmark/studies/hybrid_actions.py (about 6 minutes on two cores)
It writes benchmark/studies/hybrid_actions.csv.gz and benchmark/studies/hybrid_actions.svg.
"""

from typing import Any

import gymnasium as gym
import numpy as np
from common import (
    Job,
    Recorder,
    Row,
    grid_of_axes,
    legend_below,
    mean_and_std,
    parse_arguments,
    plot_curve,
    print_table,
    run_grid,
    save_plot,
    select,
    write_csv,
)
from gymnasium import spaces
from matplotlib.figure import Figure
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.distributions import ActionDist

TASKS = {"3 mates": 3, "12 mates": 12}
ARMS: dict[str, tuple[str, ActionDist]] = {
    "hybrid, gaussian": ("hybrid", "gaussian"),
    "hybrid, beta": ("hybrid", "beta"),
    "box, gaussian": ("box", "gaussian"),
    "box, beta": ("box", "beta"),
    "levels": ("levels", "gaussian"),
}
N_ENVS, N_STEPS, EPISODE_LENGTH, N_LEVELS = 8, 64, 10, 11


class Passing(gym.Env):
    """
    The task.

    :param n_mates: Number of team mates
    :param kind: Kind of the action space, ``"hybrid"``, ``"box"`` or ``"levels"``
    """

    def __init__(self, n_mates: int, kind: str):
        self.n_mates = n_mates
        power = spaces.Box(-1.0, 1.0, (1,), np.float32)
        choices: dict[str, spaces.Space] = {
            "hybrid": spaces.Dict(mate=spaces.Discrete(n_mates), power=power),
            "box": spaces.Box(-1.0, 1.0, (n_mates + 1,), np.float32),
            "levels": spaces.MultiDiscrete([n_mates, N_LEVELS]),
        }
        self.action_space = choices[kind]
        self.observation_space = spaces.Box(-1.0, 1.0, (2 * n_mates,), np.float32)

    def _observe(self) -> np.ndarray:
        self.free = int(self.np_random.integers(self.n_mates))
        self.distances = self.np_random.uniform(-0.8, 0.8, self.n_mates)
        return np.concatenate([np.eye(self.n_mates)[self.free], self.distances]).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.n_passes = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if isinstance(self.action_space, spaces.Dict):
            mate, power = action["mate"], action["power"][0]
        elif isinstance(self.action_space, spaces.Box):
            mate, power = np.argmax(action[:-1]), action[-1]
        else:
            mate, power = action[0], 2 * action[1] / (N_LEVELS - 1) - 1
        self.n_passes += 1
        score = max(0.0, 1 - 2 * abs(power - self.distances[self.free])) if mate == self.free else 0.0
        return self._observe(), float(score), False, self.n_passes >= EPISODE_LENGTH, {}


def run(job: Job) -> list[Row]:
    kind, action_dist = ARMS[job.settings["arm"]]
    env_kwargs = {"n_mates": TASKS[job.settings["task"]], "kind": kind}
    model = PPOExt(
        "MlpPolicy",
        make_vec_env(Passing, N_ENVS, seed=job.seed, env_kwargs=env_kwargs),
        n_steps=N_STEPS,
        batch_size=128,
        gamma=0.5,
        learning_rate=1e-3,
        action_dist=action_dist,
        seed=job.seed,
        device="cpu",
    )

    def evaluation(model: PPOExt) -> Row:
        mean, _ = evaluate_policy(model, make_vec_env(Passing, 1, seed=1000, env_kwargs=env_kwargs), 20)
        return {"evaluation": float(np.mean(mean))}

    recorder = Recorder({}, every=8, measure=evaluation)
    model.learn(job.timesteps, callback=recorder)
    return recorder.rows


def report(rows: list[Row]) -> None:
    for task in TASKS:
        ends = sorted({row["timesteps"] for row in rows})
        chosen = [ends[(len(ends) - 1) * quarter // 4] for quarter in (1, 2, 3, 4)] if len(ends) > 4 else ends
        lines = []
        for arm in ARMS:
            kinds = [select(rows, task=task, arm=arm, timesteps=end) for end in chosen]
            lines.append([arm, *(mean_and_std(np.array([row["evaluation"] for row in kind])) for kind in kinds)])
        print_table(f"{task}: return of the deterministic policy, mean ± std over seeds", ["", *map(str, chosen)], lines)


def plot(rows: list[Row]) -> Figure:
    figure, axes = grid_of_axes(len(TASKS))
    for panel, task in zip(axes, TASKS, strict=True):
        for arm in ARMS:
            plot_curve(panel, select(rows, task=task, arm=arm), "evaluation", label=arm)
        panel.set(title=task, xlabel="1000 timesteps", ylabel="return", ylim=(0, 10))
    legend_below(figure, axes[0])
    return figure


def main() -> None:
    arguments = parse_arguments(__doc__, timesteps=61_440)
    rows = run_grid(run, [{"task": task, "arm": arm} for task in TASKS for arm in ARMS], arguments)
    write_csv(arguments.out / "hybrid_actions.csv.gz", rows)
    save_plot(plot(rows), arguments.out / "hybrid_actions.svg")
    report(rows)


if __name__ == "__main__":
    main()
