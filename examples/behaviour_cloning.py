"""
Behaviour cloning: a policy learns the recorded actions of an expert, and PPOExt goes on from there.

Run it: python examples/behaviour_cloning.py --action-dist beta --timesteps 30000
It takes a minute on the CPU, and prints the mean return of the expert, of the clone, of the clone after PPO, and of PPO
without cloning.
"""

import argparse
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.utils import explained_variance

from sb3_ppo_ext import FastDummyVecEnv, MlpPolicy, PPOExt

# Options of PPO on Pendulum; the discount is also that of the returns of the demonstrations.
OPTIONS: dict[str, Any] = dict(n_steps=256, batch_size=128, gamma=0.95, gae_lambda=0.95, learning_rate=3e-4)


class Demonstrations(NamedTuple):
    """
    Recorded steps of an expert.

    :param observations: What the expert saw, an array of shape ``(n, *observation_shape)``, or a dictionary of such arrays
    :param actions: What it did, as the environment gets it, shape ``(n, *action_shape)``; for a ``Dict`` or ``Tuple`` action
        space, a list of actions
    :param returns: Discounted sums of the rewards that followed, shape ``(n,)``; ``None`` if they are not known
    """

    observations: Any
    actions: Any
    returns: np.ndarray | None = None


def clone(
    model: PPOExt,
    demonstrations: Demonstrations,
    n_epochs: int = 100,
    batch_size: int = 256,
    learning_rate: float = 1e-2,
    ent_coef: float = 1e-3,
    vf_coef: float = 0.5,
    margin: float = 0.01,
) -> list[float]:
    """
    Pretrain the policy of a model: maximise the log probability of the recorded actions, and let the critic predict the
    returns, so that the first updates of PPO do not follow a critic that knows nothing.

    The standard deviation of a Gaussian stays what it is, because that of a deterministic expert is 0, and PPO has to explore.
    For the other distributions, which have none, the bonus for the entropy serves this purpose. PPO's own optimiser is not
    used, and starts afresh.

    :param model: Model whose policy has no memory
    :param demonstrations: Recorded steps
    :param n_epochs: Number of passes over them
    :param batch_size: Minibatch size
    :param learning_rate: Learning rate of Adam at the start; it decays to 0
    :param ent_coef: Coefficient of the entropy
    :param vf_coef: Coefficient of the value loss, the squared error divided by the variance of the returns
    :param margin: Distance from the bounds of a ``Box``, as a fraction of its width, to which closer actions are moved if the
        action distribution is bounded: its density at a bound is infinite or zero, and would outweigh all other actions
    :return: Mean negative log likelihood of the actions in each epoch
    """
    policy, (observations, actions, returns) = model.policy, demonstrations
    if hasattr(policy, "make_memory"):
        raise ValueError(f"{type(policy).__name__} has a memory, and learns from whole episodes; give a policy without one")
    if isinstance(model.action_space, spaces.Box) and policy.squash_output:
        low, high = model.action_space.low, model.action_space.high
        actions = np.clip(actions, low + margin * (high - low), high - margin * (high - low))

    def evaluate(inputs: Any, batch: Any) -> tuple[th.Tensor, th.Tensor, th.Tensor | None]:
        if hasattr(policy, "evaluate_env_actions"):
            return policy.evaluate_env_actions(inputs, batch)
        # SB3's own policies, which PPOExt uses unless an option needs, or a user gives, one of this package
        return policy.evaluate_actions(inputs, th.as_tensor(batch, device=policy.device))

    learned = [parameter for name, parameter in policy.named_parameters() if name != "log_std"]
    optimizer = th.optim.Adam(learned, learning_rate)
    policy.set_training_mode(True)
    losses = []
    for n in range(n_epochs):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * (1 - n / n_epochs)
        shuffled, epoch = np.random.permutation(len(actions)), []
        for start in range(0, len(actions), batch_size):
            batch = shuffled[start : start + batch_size]
            inputs, _ = policy.obs_to_tensor(_take(observations, batch))
            values, log_probs, entropies = evaluate(inputs, _take(actions, batch))
            loss = -log_probs.mean() - (0.0 if entropies is None else ent_coef * entropies.mean())
            if returns is not None:
                errors = values.flatten() - th.as_tensor(returns[batch], dtype=th.float32, device=values.device)
                loss = loss + vf_coef * errors.square().mean() / max(returns.var(), 1e-8)
            optimizer.zero_grad()
            loss.backward()
            th.nn.utils.clip_grad_norm_(learned, 0.5)
            optimizer.step()
            epoch.append(-log_probs.mean().item())
        losses.append(float(np.mean(epoch)))
    policy.set_training_mode(False)
    return losses


def _take(data: Any, batch: np.ndarray) -> Any:
    if isinstance(data, dict):
        return {key: part[batch] for key, part in data.items()}
    return [data[index] for index in batch] if isinstance(data, list) else data[batch]


def demonstrations_of(episodes: Iterable[Any], gamma: float) -> Demonstrations:
    """
    :param episodes: Recorded episodes with ``observations``, ``actions`` and ``rewards``, such as those of a data set of
        Minari; the observation after the last action is left out
    :param gamma: Discount factor of the returns, which end with the episode
    :return: Their steps
    """
    observations, actions, returns = [], [], []
    for episode in episodes:
        observations.append(_take(episode.observations, np.arange(len(episode.rewards))))
        actions += _steps_of(episode.actions)
        returns.append(discounted(episode.rewards, gamma))
    if isinstance(observations[0], dict):
        seen: Any = {key: np.concatenate([each[key] for each in observations]) for key in observations[0]}
    else:
        seen = np.concatenate(observations)
    return Demonstrations(
        seen, actions if isinstance(actions[0], dict | tuple) else np.stack(actions), np.concatenate(returns)
    )


def _steps_of(actions: Any) -> list[Any]:
    if isinstance(actions, dict):
        return [dict(zip(actions, step, strict=True)) for step in zip(*actions.values(), strict=True)]
    return list(zip(*actions, strict=True)) if isinstance(actions, tuple) else list(actions)


def discounted(rewards: Sequence[float], gamma: float) -> np.ndarray:
    """The discounted sum of the rewards that follow each step of an episode."""
    following = 0.0
    return np.array([following := float(reward) + gamma * following for reward in reversed(rewards)])[::-1]


def swing_up(observation: np.ndarray) -> np.ndarray:
    """An expert for Pendulum-v1: it pumps energy until the pendulum is close to the top, where it holds it."""
    cosine, sine, speed = observation
    angle = np.arctan2(sine, cosine)
    energy = speed**2 / 2 + 15.0 * (cosine - 1.0)
    torque = -(10.0 * angle + 2.0 * speed) if cosine > 0.95 else -energy * np.sign(speed or 1.0)
    return np.clip([torque], -2.0, 2.0).astype(np.float32)


def record(n_episodes: int, gamma: float, noise: float = 0.5, seed: int = 0) -> tuple[Demonstrations, float]:
    """
    :param n_episodes: Number of episodes
    :param gamma: Discount factor of the returns
    :param noise: Standard deviation of noise that is added to the actions, but not recorded: the policy also learns to come
        back from where the expert alone would not have been
    :param seed: Seed
    :return: Demonstrations of the expert, and its mean return
    """
    env, random = gym.make("Pendulum-v1"), np.random.default_rng(seed)
    observations, actions, returns, totals = [], [], [], []
    for episode in range(n_episodes):
        observation, _ = env.reset(seed=seed + episode)
        rewards: list[float] = []
        over = False
        while not over:
            action = swing_up(observation)
            observations.append(observation)
            actions.append(action)
            observation, reward, terminated, truncated, _ = env.step(
                np.clip(action + noise * random.normal(size=1), -2.0, 2.0)
            )
            rewards.append(float(reward))
            over = terminated or truncated
        totals.append(sum(rewards))
        returns.append(discounted(rewards, gamma))
    return Demonstrations(np.stack(observations), np.stack(actions), np.concatenate(returns)), float(np.mean(totals))


def make_model(action_dist: str, seed: int) -> PPOExt:
    """A model for Pendulum with this action distribution, ``"gsde"`` for a Gaussian with gSDE."""
    env = make_vec_env("Pendulum-v1", 4, seed=seed, vec_env_cls=FastDummyVecEnv)
    options = dict(use_sde=True) if action_dist == "gsde" else dict(action_dist=action_dist)
    policy_kwargs = {} if action_dist == "beta" else dict(log_std_init=-1.0)
    return PPOExt(MlpPolicy, env, policy_kwargs=policy_kwargs, seed=seed, device="cpu", **OPTIONS, **options)


def mean_return(model: PPOExt) -> float:
    """Mean return of 20 episodes, with deterministic actions."""
    env = make_vec_env("Pendulum-v1", 4, seed=1000, vec_env_cls=FastDummyVecEnv)
    return float(evaluate_policy(model, env, n_eval_episodes=20)[0])


def main() -> dict[str, float]:
    """Clone the expert, train on, and print what it is worth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = ["gaussian", "gsde", "squashed_gaussian", "beta"]
    parser.add_argument("--action-dist", choices=choices, default="gaussian")
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--timesteps", type=int, default=30_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    model = make_model(arguments.action_dist, arguments.seed)
    demonstrations, of_expert = record(arguments.episodes, model.gamma, seed=arguments.seed)
    losses = clone(model, demonstrations)
    print(f"Negative log likelihood: {losses[0]:.3f} in the first epoch, {losses[-1]:.3f} in the last one")
    results = {"expert, with noise": of_expert, "clone": mean_return(model)}
    inputs, _ = model.policy.obs_to_tensor(demonstrations.observations)
    with th.no_grad():
        values = model.policy.predict_values(inputs).flatten().numpy()
    print(f"Explained variance of the returns by the critic: {explained_variance(values, demonstrations.returns):.2f}")
    results["clone, then PPO"] = mean_return(model.learn(arguments.timesteps))
    results["PPO alone"] = mean_return(make_model(arguments.action_dist, arguments.seed).learn(arguments.timesteps))
    for name, value in results.items():
        print(f"Mean return, {name}: {value:.0f}")
    return results


if __name__ == "__main__":
    main()
