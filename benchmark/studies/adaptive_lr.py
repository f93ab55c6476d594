"""
Whether a KL-adaptive learning rate makes the choice of the initial rate less important.

Pendulum-v1 with the hyperparameters of the package (without gSDE), with initial rates over two orders of magnitude: a fixed
rate against `adaptive_lr_kl` of 0.01 and 0.02.

Run it: python benchmark/studies/adaptive_lr.py (about 9 minutes on two cores)
It writes benchmark/studies/adaptive_lr.csv.gz and benchmark/studies/adaptive_lr.svg.
"""

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
    run_grid,
    save_plot,
    select,
    write_csv,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from stable_baselines3.common.env_util import make_vec_env

from sb3_ppo_ext import PPOExt

STARTS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
VARIANTS: dict[str, float | None] = {"fixed": None, "adaptive 0.01": 0.01, "adaptive 0.02": 0.02}
N_ENVS = 4
KEYS = {"lr": "train/learning_rate", "kl": "train/approx_kl", "clip_fraction": "train/clip_fraction"}


def run(job: Job) -> list[Row]:
    model = PPOExt(
        "MlpPolicy",
        make_vec_env("Pendulum-v1", N_ENVS, seed=job.seed),
        learning_rate=job.settings["start"],
        n_steps=1024,
        gamma=0.9,
        stats_window_size=20,
        device="cpu",
        backend="eager",
        seed=job.seed,
        adaptive_lr_kl=VARIANTS[job.settings["rate"]],
    )
    recorder = Recorder(KEYS)
    model.learn(job.timesteps, callback=recorder)
    return recorder.rows


def last(rows: list[Row]) -> list[Row]:
    """The last row of each run, which has the mean return of the last 20 episodes."""
    end = max(row["timesteps"] for row in rows)
    return select(rows, timesteps=end)


def report(rows: list[Row]) -> None:
    header = ["learning rate", *(f"from {start:g}" for start in STARTS), "worst", "mean"]
    for title, column, digits in (("return of the last 20 episodes", "return", 0), ("KL of the last update", "kl", 4)):
        lines = []
        for name in VARIANTS:
            kinds = [per_seed(last(select(rows, rate=name, start=start)), column) for start in STARTS]
            means = np.array([kind.mean() for kind in kinds])
            worst = means.min() if column == "return" else means.max()
            cells = [mean_and_std(kind, digits) for kind in kinds]
            lines.append([name, *cells, f"{worst:.{digits}f}", f"{means.mean():.{digits}f}"])
        print_table(f"{title}, mean ± std over seeds", header, lines)
    lines = []
    for name in VARIANTS:
        kinds = [per_seed(last(select(rows, rate=name, start=start)), "lr") for start in STARTS]
        lines.append([name, *(f"{kind.min():.1e} to {kind.max():.1e}" for kind in kinds)])
    print_table("learning rate of the last update, minimum and maximum over seeds", header[:-2], lines)


def as_typed(name: str) -> str:
    """:return: Name of a variant in the plot, with the option that is typed for it"""
    return name.replace("adaptive ", "adaptive_lr_kl=")


def plot_finals(axes: Axes, rows: list[Row]) -> None:
    for name in VARIANTS:
        finals = np.array([per_seed(last(select(rows, rate=name, start=start)), "return") for start in STARTS])
        [line] = axes.plot(STARTS, finals.mean(axis=1), "o-", label=as_typed(name))
        axes.fill_between(STARTS, finals.min(axis=1), finals.max(axis=1), color=line.get_color(), alpha=0.12, linewidth=0)
    axes.set(xscale="log", xlabel="initial learning rate", ylabel="return of the last 20 episodes", title="at the end")
    axes.legend(fontsize=8)


def plot(rows: list[Row]) -> Figure:
    labels = {"return": "return", "lr": "learning rate", "kl": "KL divergence, nats"}
    panels = [(name, column) for column in ("return", "lr") for name in VARIANTS if (name, column) != ("fixed", "lr")]
    panels.append(("adaptive 0.01", "kl"))
    figure, axes = grid_of_axes(1 + len(panels))
    plot_finals(axes[0], rows)
    for ax, (name, column) in zip(axes[1:], panels, strict=True):
        for start in STARTS:
            plot_curve(ax, select(rows, rate=name, start=start), column, label=f"from {start:g}")
        scale = "linear" if column == "return" else "log"
        ax.set(title=as_typed(name), xlabel="1000 timesteps", ylabel=labels[column], yscale=scale)
        if column == "return":
            ax.set_ylim(-1700, 0)
    legend_below(figure, axes[1], n_columns=5)
    return figure


def main() -> None:
    arguments = parse_arguments(__doc__, timesteps=61_440, seeds=3)
    settings = [{"rate": name, "start": start} for name in VARIANTS for start in STARTS]
    rows = run_grid(run, settings, arguments)
    write_csv(arguments.out / "adaptive_lr.csv.gz", rows)
    save_plot(plot(rows), arguments.out / "adaptive_lr.svg")
    report(rows)


if __name__ == "__main__":
    main()
