"""The comparison of the working tree with a revision says what is slower, and nothing else."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import benchmark_against as against
import benchmark_speed as speed

TINY = dict(env="CartPole-v1", n_envs=2, steps=32, policy="MlpPolicy", options=dict(n_steps=16, batch_size=16, n_epochs=1))


@pytest.mark.parametrize(("factor", "slower"), [(1.0, False), (1.2, True), (0.8, False)])
def test_slower(factor, slower):
    """A configuration is slower if the interval of the ratio is below 1; the first turn makes the model and is left out."""

    def turn_of(each, sign):
        made = []

        def turn(case):
            made.append(case)
            return 1e3 if len(made) == 1 else each * (1 + 0.03 * sign * (-1) ** len(made))  # now faster, now slower

        return turn

    turns = {against.REVISION: turn_of(1.0, 1), against.TREE: turn_of(factor, -1)}
    ((name, times),) = against.compare({"a": TINY}, turns, rounds=12)
    assert name == "a"
    assert {len(each) for each in times.values()} == {12}
    result = speed.ratios(times, against.REVISION)[against.TREE]
    assert result["ratio"] == pytest.approx(1 / factor, rel=0.1)
    assert against.is_slower(result) == slower


@pytest.mark.slow
@pytest.mark.integration
def test_a_turn_in_a_process():
    """A process trains with the package of a checkout, the same model in each turn, and answers with a time."""
    with against.trainer_in(against.ROOT) as turn:
        assert turn(TINY) > 0
        assert turn(TINY) > 0


@pytest.mark.integration
@pytest.mark.skipif(not (against.ROOT / ".git").exists() or shutil.which("git") is None, reason="needs the repository")
def test_check_out(tmp_path):
    """A revision is written with its sources, from which the extension modules are built."""
    against.check_out("HEAD", tmp_path)
    assert (tmp_path / "setup.py").exists()
    assert (tmp_path / "sb3_ppo_ext" / "engines").is_dir()
