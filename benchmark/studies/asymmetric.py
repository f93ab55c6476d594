"""
What a critic is worth that knows what the actor cannot see (`critic_keys`): asymmetric against symmetric critics.

Observations have two keys: what the actor sees, and the hidden state. In the T-maze, the cue is seen at the start alone; in
the noisy cart-pole, there are no velocities, and positions have noise: actor and critic are transformers. In the quiz, rewards
have an offset that is not seen, and the networks need no memory. All else is the same: networks, rollouts, learning rates.

Run it: python benchmark/studies/asymmetric.py (about five minutes on two cores)
It writes benchmark/studies/asymmetric.csv.gz and benchmark/studies/asymmetric.svg.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
    per_seed,
    plot_curve,
    print_table,
    read_csv,
    run_task,
    save_plot,
    select,
)
from gymnasium import spaces
from matplotlib.figure import Figure
from memory_tasks import TMaze, noisy_cart_pole
from stable_baselines3.common.env_util import make_vec_env

from sb3_ppo_ext import FastDummyVecEnv, PPOExt

SEEN, HIDDEN = "seen", "hidden"
# Keys of actor and critic
ARMS = {"symmetric": ([SEEN], [SEEN]), "asymmetric": ([SEEN], [SEEN, HIDDEN])}
COLORS = dict(zip(ARMS, ("C1", "C0"), strict=True))
OPTIONS: dict[str, Any] = dict(n_steps=128, batch_size=256, n_epochs=5, learning_rate=1e-3, ent_coef=0.01, device="cpu")
TRANSFORMER = dict(context_length=16, d_model=32, net_arch=[32])


class WithHidden(gym.ObservationWrapper):
    """
    :param env: Environment with a vector as observation
    :param hidden: Function of the unwrapped environment that returns the hidden state
    """

    def __init__(self, env: gym.Env, hidden: Callable[[Any], Any]):
        super().__init__(env)
        env.reset(seed=0)
        self.hidden = hidden
        size = np.size(hidden(env.unwrapped))
        box = spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self.observation_space = spaces.Dict({SEEN: env.observation_space, HIDDEN: box})

    def observation(self, observation: np.ndarray) -> dict[str, np.ndarray]:
        return {SEEN: observation, HIDDEN: np.ravel(self.hidden(self.unwrapped)).astype(np.float32)}


class Quiz(gym.Env):
    """
    One of eight questions is asked at each step, with four answers. An episode with all answers right has the return 1. Each
    reward also has an offset; those of an episode are drawn anew, and their sum is 0.
    """

    action_space = spaces.Discrete(4)
    observation_space = spaces.Box(0.0, 1.0, (8,), np.float32)
    n_steps = 16

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        offsets = self.np_random.standard_normal(self.n_steps)
        self.offsets, self.now = offsets - offsets.mean(), 0
        return self._ask(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        reward = (action == self.question % 4) / self.n_steps + self.offsets[self.now]
        self.now += 1
        return self._ask(), float(reward), self.now == self.n_steps, False, {}

    def _ask(self) -> np.ndarray:
        self.question = int(self.np_random.integers(8))
        return np.eye(8, dtype=np.float32)[self.question]

    def hidden(self) -> tuple[float, float]:
        """:return: The offset of the next reward, and the sum of those that are left"""
        left = self.offsets[self.now :]
        return left[0] if len(left) > 0 else 0.0, left.sum()


@dataclass(frozen=True)
class Task:
    """
    :param env: Factory of the environment
    :param hidden: Function of the unwrapped environment that returns the hidden state
    :param timesteps: Number of timesteps of a run
    :param policy: Name of the policy
    :param policy_kwargs: Its keywords, without the keys
    """

    env: Callable[[], gym.Env]
    hidden: Callable[[Any], Any]
    timesteps: int
    policy: str
    policy_kwargs: dict[str, Any]

    def make(self) -> gym.Env:
        return WithHidden(self.env(), self.hidden)


TASKS = {
    "T-maze 10": Task(
        partial(TMaze, 10), lambda env: (env.cue, env.position / 10), 60_000, "MultiInputTransformerPolicy", TRANSFORMER
    ),
    "noisy cart-pole": Task(noisy_cart_pole, lambda env: env.state, 60_000, "MultiInputTransformerPolicy", TRANSFORMER),
    "quiz": Task(Quiz, Quiz.hidden, 60_000, "MultiInputPolicy", {}),
}


def run(job: Job) -> list[Row]:
    """Train one model."""
    task, (actor_keys, critic_keys) = TASKS[job.settings["task"]], ARMS[job.settings["arm"]]
    env = make_vec_env(task.make, 8, seed=job.seed, vec_env_cls=FastDummyVecEnv)
    keywords = dict(task.policy_kwargs, actor_keys=actor_keys, critic_keys=critic_keys, share_features_extractor=False)
    model = PPOExt(task.policy, env, seed=job.seed, policy_kwargs=keywords, **OPTIONS)
    recorder = Recorder({"explained_variance": "train/explained_variance"}, every=2)
    model.learn(job.timesteps, callback=recorder)
    return recorder.rows


def plot(rows: list[Row]) -> Figure:
    figure, axes = grid_of_axes(2 * len(TASKS))
    for row, task in zip(axes.reshape(-1, 2), TASKS, strict=True):
        for ax, name in zip(row, ("return", "explained_variance"), strict=True):
            for arm, color in COLORS.items():
                if of_arm := select(rows, task=task, arm=arm):
                    plot_curve(ax, of_arm, name, label=arm, color=color)
            ax.set(title=task, xlabel="1000 timesteps", ylabel=name.replace("_", " "))
    legend_below(figure, axes[0])
    return figure


def main() -> None:
    arguments = parse_arguments(__doc__, timesteps=None, tasks=tuple(TASKS), arms=tuple(ARMS))
    path = arguments.out / "asymmetric.csv.gz"
    for task in arguments.tasks:
        run_task(run, task, TASKS[task].timesteps, arguments.arms, arguments, path)
    rows = read_csv(path)
    lines = []
    for task in TASKS:
        for arm in ARMS:
            if of_arm := select(rows, task=task, arm=arm):
                end = max(row["timesteps"] for row in of_arm)
                means = [per_seed(of_arm, "return", start=(part - 0.1) * end, end=part * end) for part in (0.3, 0.6, 1)]
                variances = per_seed(of_arm, "explained_variance")
                lines.append([task, arm, *map(mean_and_std, means), mean_and_std(variances)])
    header = ["", "", "return at 30 %", "at 60 %", "at the end", "explained variance"]
    print_table("In training, mean ± std over seeds", header, lines)
    save_plot(plot(rows), arguments.out / "asymmetric.svg")


if __name__ == "__main__":
    main()
