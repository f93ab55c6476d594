"""What a training has logged is read back and drawn, from a file of RL Zoo or from TensorBoard."""

import shutil
import sys

import gymnasium as gym
import numpy as np
import pytest
from matplotlib.figure import Figure
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import Figure as TensorBoardFigure
from stable_baselines3.common.logger import configure
from support.toys import make_toys

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.plot_run import PANELS, find_runs, main, plot_runs, read_log
from sb3_ppo_ext.zoo.progress_file import ProgressFile

pytestmark = pytest.mark.integration

SMALL = dict(n_steps=16, batch_size=16, n_epochs=1, device="cpu")
KEYS = [key for panel in PANELS for key in panel.keys]


def lines(figure):
    """The panels with the data of their lines."""
    return {ax.get_title(): [line.get_xydata() for line in ax.lines] for ax in figure.axes if ax.get_title()}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A folder of a training that logs to both kinds of files, with options that log more."""
    folder = tmp_path_factory.mktemp("run")
    model = PPOExt("MlpPolicy", make_toys(length=5), advantage_norm="ema", critic_learning_rate=1e-3, **SMALL)
    model.set_logger(configure(str(folder / "tensorboard"), ["tensorboard"]))
    model.learn(128, callback=ProgressFile(folder))
    return folder


def test_both_sources_say_the_same(run_folder):
    """The CSV file and the TensorBoard file of a training hold the same numbers at the same steps."""
    ours, theirs = read_log(run_folder), read_log(run_folder / "tensorboard")
    assert {"rollout/ep_rew_mean", "train/approx_kl", "adv/ema_std", "train/critic_learning_rate"} <= ours.keys()
    for key in set(KEYS) & ours.keys():
        np.testing.assert_array_equal(ours[key][0], theirs[key][0], err_msg=key)
        np.testing.assert_allclose(ours[key][1], theirs[key][1], rtol=1e-6, err_msg=key)


def test_what_is_drawn_is_what_was_logged(run_folder):
    """The lines of the panels are the logged numbers."""
    log, drawn = read_log(run_folder), lines(plot_runs([run_folder]))
    np.testing.assert_array_equal(drawn["KL divergence"][0], np.stack(log["train/approx_kl"], axis=1))
    np.testing.assert_array_equal(drawn["entropy"][0][:, 1], -log["train/entropy_loss"][1])
    assert len(drawn["learning rate"]) == 2
    assert len(drawn["advantages"]) == 4


def test_a_training_that_goes_on_adds_to_the_file(tmp_path):
    """A training that goes on adds to the file, with SB3's own logger and a user's; one that begins replaces it."""
    for logger in (None, configure(str(tmp_path / "other"), ["csv"])):
        model = PPOExt("MlpPolicy", make_toys(length=5), **SMALL)
        if logger:
            model.set_logger(logger)
        steps = []
        for again in (False, True, True):
            model.learn(64, reset_num_timesteps=not again, callback=ProgressFile(tmp_path))
            steps.append(read_log(tmp_path)["time/fps"][0].tolist())
        assert steps[0] == [n for n in steps[2] if n <= 64]
        assert steps[1] == [n for n in steps[2] if n <= 128]
        assert steps[2] == sorted(steps[2])
        assert len(steps[2]) == 3 * len(steps[0])
        if logger:
            assert len(logger.output_formats) == 1


def test_what_is_no_number_is_left_to_other_writers(tmp_path):
    """A figure or a word that is logged for TensorBoard does not end the training."""

    class Drawing(BaseCallback):
        def _on_step(self):
            self.logger.record("a/figure", TensorBoardFigure(Figure(), close=True))
            self.logger.record("a/word", "one, two")
            self.logger.record("a/number", np.float32(0.5))
            return True

    PPOExt("MlpPolicy", make_toys(length=5), **SMALL).learn(64, callback=[Drawing(), ProgressFile(tmp_path)])
    log = read_log(tmp_path)
    assert set(log["a/number"][1]) == {0.5}
    assert not {"a/figure", "a/word"} & log.keys()


def test_the_end_of_a_training_that_did_not_begin(tmp_path):
    """
    The end of a training that did not begin, which RL Zoo announces to its callbacks, raises no error that would hide why.
    """
    callback = ProgressFile(tmp_path)
    callback.on_training_end()
    PPOExt("MlpPolicy", make_toys(length=5), **SMALL).learn(64, callback=callback)
    callback.on_training_end()
    assert len(read_log(tmp_path)["train/loss"][0]) > 0


def test_quantities_that_were_not_logged_have_no_panel(tmp_path):
    """A log of SB3's PPO on discrete actions has fewer panels."""
    model = PPO("MlpPolicy", "CartPole-v1", **SMALL)
    model.set_logger(configure(str(tmp_path), ["csv"]))
    model.learn(64)
    drawn = lines(plot_runs([tmp_path]))
    assert {"KL divergence", "clip fraction", "entropy", "learning rate"} <= drawn.keys()
    assert not {"advantages", "spread of the actions", "gradient norm"} & drawn.keys()


def test_several_runs(run_folder):
    """Each run has a line in each panel, and the legend names it."""
    assert lines(plot_runs(str(run_folder))).keys() == lines(plot_runs([run_folder])).keys()
    figure = plot_runs([run_folder, run_folder / "tensorboard"])
    assert len(lines(figure)["clip fraction"]) == 2
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [run_folder.name, "tensorboard"]
    assert len({line.get_color() for line in figure.axes[1].lines}) == 2


def test_runs_of_other_algorithms(tmp_path):
    """
    Runs in nested folders are found, those of SB3's PPO with RL Zoo by their Monitor files and evaluations, and each algorithm
    has a colour.
    """
    for number in (1, 2):
        folder = tmp_path / "ppo_ext" / f"Toy_{number}"
        PPOExt("MlpPolicy", make_toys(length=5), **SMALL).learn(64, callback=ProgressFile(folder))
        folder = tmp_path / "ppo" / f"Toy_{number}"
        folder.mkdir(parents=True)
        env = make_vec_env(lambda: gym.wrappers.TimeLimit(gym.make("CartPole-v1"), 5), 2, monitor_dir=str(folder))
        PPO("MlpPolicy", env, **SMALL).learn(64)
        np.savez(folder / "evaluations.npz", timesteps=[32, 64], results=[[1.0, 3.0], [4.0, 6.0]])
    runs = find_runs([tmp_path])
    assert [str(run.relative_to(tmp_path)) for run in runs] == ["ppo/Toy_1", "ppo/Toy_2", "ppo_ext/Toy_1", "ppo_ext/Toy_2"]
    log = read_log(runs[0])
    assert log["eval/mean_reward"][1].tolist() == [2.0, 5.0]
    steps, returns = log["rollout/ep_rew_mean"]
    assert 5 <= steps[0] < steps[-1] <= 64
    assert np.isfinite(returns).all()
    (tmp_path / "ppo_ext" / "Toy_3").mkdir()
    (tmp_path / "ppo_ext" / "Toy_3" / "progress.csv").touch()  # a training that has just begun
    figure = plot_runs([tmp_path])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["ppo", "ppo_ext"]
    assert [line.get_color() for line in figure.axes[0].lines] == ["0.45", "0.45", "0.45", "0.45", "C0", "C0"]


def test_panels_are_labelled(run_folder):
    """Each panel says what its axes are, in which units, and has a grid."""
    for ax in plot_runs([run_folder]).axes:
        if ax.get_title():
            assert ax.get_xlabel() == "timesteps"
            assert ax.get_ylabel()
            assert any(line.get_visible() for line in ax.get_xgridlines())


def test_no_file_is_overwritten(run_folder, tmp_path, monkeypatch, capsys):
    """A plot that is there is kept, and the next one has another name."""
    (tmp_path / "run.png").write_text("mine")
    monkeypatch.setattr(sys, "argv", ["plot_run", str(run_folder), "-o", str(tmp_path / "run.png")])
    main()
    main()
    assert capsys.readouterr().out.split() == [str(tmp_path / "run_2.png"), str(tmp_path / "run_3.png")]
    assert (tmp_path / "run.png").read_text() == "mine"


@pytest.mark.xdist_group("trained")
def test_run_of_the_zoo(trained, monkeypatch, capsys):
    """One command plots a run of the Zoo, which keeps the log of `ppo_ext`, evaluations included."""
    folder = trained / "logs" / "ppo_ext" / "CartPole-v1_1"
    monkeypatch.setattr(sys, "argv", ["plot_run", str(folder)])
    main()
    assert capsys.readouterr().out.strip() == str(folder / "run.png")
    assert (folder / "run.png").stat().st_size > 10_000
    assert {"eval/mean_reward", "rollout/ep_rew_mean", "train/clip_fraction"} <= read_log(folder).keys()


def refused(monkeypatch, capsys, *arguments):
    """What the command prints before it gives up."""
    monkeypatch.setattr(sys, "argv", ["plot_run", *map(str, arguments)])
    with pytest.raises(SystemExit, match="2"):
        main()
    return capsys.readouterr().err


def test_bad_folders(tmp_path, monkeypatch, capsys):
    """A folder without a log and one with an empty log are refused, and nothing is written."""
    (tmp_path / "none").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "progress.csv").touch()
    for folder, message in (tmp_path / "none", "no `progress.csv`"), (tmp_path / "empty", "is empty"), (tmp_path, "are empty"):
        assert message in refused(monkeypatch, capsys, folder, "-o", tmp_path / "plots" / "run.png")
    assert not (tmp_path / "plots").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [("monitor.csv", b""), ("progress.csv", b"a,b\n1,2\n1,2,3\n"), ("evaluations.npz", b"PK broken")],
)
def test_damaged_logs(name, content, run_folder, tmp_path, monkeypatch, capsys):
    """A damaged log is named; where others are found as well, it is left out."""
    for copied in ("runs/damaged", "runs/whole"):
        shutil.copytree(run_folder, tmp_path / copied)
    damaged = tmp_path / "runs" / "damaged"
    if name == "monitor.csv":
        (damaged / "progress.csv").unlink()
    (damaged / name).write_bytes(content)
    assert "cannot be read, perhaps it is damaged" in refused(monkeypatch, capsys, damaged)
    both, whole = (plot_runs(tmp_path / name) for name in ("runs", "runs/whole"))
    assert [len(axes.lines) for axes in both.axes] == [len(axes.lines) for axes in whole.axes]


def test_bad_output(run_folder, tmp_path, monkeypatch, capsys):
    """A folder that cannot be made is refused in one line."""
    (tmp_path / "file").touch()
    assert "its folder cannot be made" in refused(monkeypatch, capsys, run_folder, "-o", tmp_path / "file" / "run.png")


def test_bad_format(run_folder, tmp_path, monkeypatch, capsys):
    """A file name that Matplotlib cannot write is refused before anything is written."""
    assert "Matplotlib writes" in refused(monkeypatch, capsys, run_folder, "-o", tmp_path / "plots" / "run.foo")
    assert not (tmp_path / "plots").exists()
