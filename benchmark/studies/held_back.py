"""
What an update learns, and what it only learns by heart: after each epoch, policy loss, value error, KL divergence, norms of
the gradients by part of the network, and entropy of the attention, on the rollout that it learns from, and on one of the same
policy in other environments.

It compares a transformer that actor and critic share with one without attention sinks, with those that also have what most
transformers have (LayerNorm with the usual epsilon, feed-forward networks), with PPO on stacked frames, and with RecurrentPPO.
The task is a cart-pole with noisy positions and no velocities.

Run it: python benchmark/studies/held_back.py (about an hour on one core, most of it for RecurrentPPO)
It writes benchmark/studies/held_back.csv.gz and benchmark/studies/held_back.svg. With `--arms` it runs some of the arms and
keeps the rows of the others.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import numpy as np
import torch as th
from common import (
    Job,
    Row,
    grid_of_axes,
    legend_below,
    mean_and_std,
    parse_arguments,
    print_table,
    read_csv,
    run_grid,
    save_plot,
    select,
    write_csv,
)
from matplotlib.figure import Figure
from robustness import make_model
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback, ConvertCallback
from torch import nn

from sb3_ppo_ext.memory.transformer import Block

ARMS = (
    "shared transformer",
    "without sinks",
    "without sinks, usual LayerNorm",
    "without sinks, usual LayerNorm, feed-forward",
    "frames",
    "RecurrentPPO",
)
TASK, RATE, N_EPOCHS = "noisy cart-pole", 1e-3, 10
PARTS = ("learning", "held back")
# Beginnings of the names of the parameters
LAYERS = {"memory": ("pi_transformer", "lstm"), "networks": ("mlp_extractor",), "outputs": ("action_net", "value_net")}


class Half:
    """
    A model and its environments.

    :param arm: Name of the arm
    :param seed: Seed of the model and of the environments
    """

    def __init__(self, arm: str, seed: int):
        kwargs: dict[str, Any] = {"n_epochs": 1}  # `train` is called once for each epoch
        if "feed-forward" in arm:
            kwargs["policy_kwargs"] = dict(ffn_dim=128)
        self.model: Any = make_model(TASK, arm, RATE, seed, **kwargs)
        self.callback: BaseCallback
        _, self.callback = self.model._setup_learn(10**9, ConvertCallback(None))

    def collect(self) -> None:
        model = self.model
        model.collect_rollouts(model.env, self.callback, model.rollout_buffer, model.n_steps)
        self.rollout = deepcopy(model.rollout_buffer)  # `train` may change it


def measure(model: Any, rollout: Any) -> Row:
    """
    Clipped gain of the policy, error of the values relative to the variance of the returns, KL divergence, norms of the
    gradients of the loss, and entropy of the attention.
    """
    whole = next(rollout.get(None))
    if isinstance(model, RecurrentPPO):
        seen = whole.mask > 0
        memory = [whole.lstm_states, whole.episode_starts]
    else:
        whole = rollout._get_samples(np.arange(rollout.buffer_size * rollout.n_envs))  # in order, for sequences
        seen, memory = th.ones(len(whole.advantages), dtype=th.bool), []
    with attention_entropies(model.policy) as entropies:
        values, log_prob, _ = model.policy.evaluate_actions(whole.observations, whole.actions.flatten(), *memory)
    advantages, returns = whole.advantages[seen], whole.returns[seen]
    log_ratio = (log_prob - whole.old_log_prob)[seen]
    normalized = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    ratio = log_ratio.exp()
    gain = th.minimum(ratio * normalized, ratio.clamp(0.8, 1.2) * normalized).mean()
    error = (values.flatten()[seen] - returns).square().mean()
    row = {"gain": gain.item(), "value_error": (error / returns.var()).item(), "kl": (ratio - 1 - log_ratio).mean().item()}
    gradients = gradient_norms(model.policy, model.vf_coef * error - gain)
    return {**row, **gradients, "attention_entropy": float(np.mean(entropies)) if entropies else np.nan}


def gradient_norms(policy: nn.Module, loss: th.Tensor) -> Row:
    named = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
    gradients = dict(zip(named, th.autograd.grad(loss, list(named.values())), strict=True))
    norms = {}
    for layers, beginnings in LAYERS.items():
        squares = [gradient.square().sum().item() for name, gradient in gradients.items() if name.startswith(beginnings)]
        norms[f"gradient_{layers}"] = float(np.sqrt(sum(squares)))
    return norms


@contextmanager
def attention_entropies(policy: nn.Module) -> Iterator[list[float]]:
    """Mean entropies of the attention in each block, where 1 is that of equal weights for all that is visible."""
    entropies: list[float] = []

    def add(block: nn.Module, inputs: Any) -> None:
        assert isinstance(block, Block)
        tokens, keys, _, visible = inputs
        with th.no_grad():
            weights = block.attention(tokens, keys, visible)
            weights /= weights.sum(dim=-1, keepdim=True)  # without that of the sink
        n_visible = (weights > 0).sum(dim=-1)
        of_weights = -(weights * weights.clamp(min=1e-30).log()).sum(dim=-1)
        entropies.append((of_weights / n_visible.log())[n_visible > 1].mean().item())

    hooks = [block.register_forward_pre_hook(add) for block in policy.modules() if isinstance(block, Block)]
    try:
        yield entropies
    finally:
        for hook in hooks:
            hook.remove()


def run(job: Job) -> list[Row]:
    arm, eps = job.settings["arm"], Block.NORM_EPS
    if "usual" in arm:
        Block.NORM_EPS = 1e-5
    try:
        halves = [Half(arm, job.seed), Half(arm, job.seed + 1000)]
    finally:
        Block.NORM_EPS = eps
    return mean_rows([row for _ in range(job.timesteps // 1024) for row in update(*halves)])


def update(learning: Half, held_back: Half) -> list[Row]:
    """Update the policy with a rollout of the first half, and measure it on both after each epoch."""
    held_back.model.policy.load_state_dict(learning.model.policy.state_dict())
    halves = dict(zip(PARTS, (learning, held_back), strict=True))
    for half in halves.values():
        half.collect()
    rows = []
    for epoch in range(1, N_EPOCHS + 1):
        learning.model.train()
        rows += [
            {"epoch": epoch, "part": part, **measure(learning.model, half.rollout), "return": recent_return(learning.model)}
            for part, half in halves.items()
        ]
    return rows


def recent_return(model: BaseAlgorithm) -> float:
    return float(np.mean([episode["r"] for episode in model.ep_info_buffer or ()] or [np.nan]))


def mean_rows(rows: list[Row]) -> list[Row]:
    """Mean over the updates of a run, for each epoch and part."""
    means = []
    for epoch in range(1, N_EPOCHS + 1):
        for part in PARTS:
            kind = select(rows, epoch=epoch, part=part)
            names = kind[0].keys() - {"epoch", "part"}
            means.append({"epoch": epoch, "part": part} | {name: mean_of([row[name] for row in kind]) for name in names})
    return means


def mean_of(values: list[float]) -> float:
    """Mean of the values that are not NaN, NaN if all are"""
    known = [value for value in values if not np.isnan(value)]
    return float(np.mean(known)) if known else np.nan


def report(rows: list[Row]) -> None:
    lines = []
    for arm in ARMS:
        for epoch in (1, 2, 5, N_EPOCHS):
            parts = [select(rows, arm=arm, epoch=epoch, part=part) for part in PARTS]
            cells = [mean_and_std(np.array([row[name] for row in part]), 3) for name in ("gain", "kl") for part in parts]
            lines.append([arm, str(epoch), *cells, mean_and_std(np.array([row["return"] for row in parts[0]]))])
    header = ["arm", "epoch", *(f"{name}, {part}" for name in ("gain", "KL") for part in PARTS), "return"]
    print_table("Means over the updates of a training run, mean ± std over seeds", header, lines)
    report_gradients(rows)


def report_gradients(rows: list[Row]) -> None:
    names = [*(f"gradient_{layers}" for layers in LAYERS), "attention_entropy"]
    lines = []
    for arm in ARMS:
        for epoch in (1, N_EPOCHS):
            kind = select(rows, arm=arm, epoch=epoch, part="learning")
            lines.append(
                [arm, str(epoch), *(mean_and_std(np.array([row.get(name, np.nan) for row in kind]), 3) for name in names)]
            )
    header = ["arm", "epoch", *(name.replace("_", ", ") for name in names)]
    print_table("Norms of gradients, and entropy of the attention relative to equal weights", header, lines)


def plot(rows: list[Row]) -> Figure:
    labels = {"gain": "gain of the objective", "kl": "KL divergence, nats", "value_error": "squared error of the value"}
    figure, axes = grid_of_axes(len(labels) * len(PARTS), sharex=True, sharey="row")
    for ax, ((name, label), part) in zip(axes, itertools.product(labels.items(), PARTS), strict=True):
        for number, arm in enumerate(ARMS):
            epochs = range(1, N_EPOCHS + 1)
            means = [np.mean([row[name] for row in select(rows, arm=arm, part=part, epoch=epoch)]) for epoch in epochs]
            ax.plot(epochs, means, color=f"C{number}", label=arm)
        ax.set(title=part, ylabel=label if part == PARTS[0] else "")
    for ax in axes[-2:]:
        ax.set_xlabel("epoch")
    legend_below(figure, axes[0], "means over updates and seeds", n_columns=2)
    return figure


def main() -> None:
    arguments = parse_arguments(__doc__, timesteps=60_000, seeds=3, arms=ARMS)
    path = arguments.out / "held_back.csv.gz"
    done = run_grid(run, [{"arm": arm} for arm in arguments.arms], arguments)
    rows = sorted(
        [row for row in read_csv(path) if row["arm"] not in arguments.arms] + done, key=lambda row: ARMS.index(row["arm"])
    )
    write_csv(path, rows)
    save_plot(plot(rows), arguments.out / "held_back.svg")
    report(rows)


if __name__ == "__main__":
    main()
