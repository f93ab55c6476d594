"""What a training of RL Zoo writes is replaced at once, and can be read without this package."""

import io
import pathlib
import pickle
from copy import deepcopy

import numpy as np
import pytest
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.vec_env import VecNormalize
from support.policies import SMALL
from support.processes import run_fresh
from support.toys import make_toys

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.zoo.atomic_saving import make_atomic


def make_normalizer():
    env = VecNormalize(make_toys(), clip_obs=3.0)
    make_atomic([env])
    env.reset()
    env.step(np.zeros((2, 2), np.float32))
    return env


@pytest.mark.integration
def test_normalizer_is_read_by_sb3(tmp_path):
    """The file is one of SB3's, with the same statistics, and this package is not imported to read it."""
    env = make_normalizer()
    env.save(str(tmp_path / "vecnormalize.pkl"))
    code = f"""
import pickle, sys
normalizer = pickle.load(open({str(tmp_path / "vecnormalize.pkl")!r}, "rb"))
print(type(normalizer).__name__, normalizer.clip_obs, normalizer.obs_rms.mean.tolist(), "sb3_ppo_ext" in sys.modules)
"""
    assert run_fresh(code) == f"VecNormalize 3.0 {env.obs_rms.mean.tolist()} False\n"
    assert type(pickle.loads(pickle.dumps(env))) is VecNormalize
    assert type(deepcopy(env)) is VecNormalize
    loaded = VecNormalize.load(tmp_path / "vecnormalize.pkl", make_toys())
    assert vars(loaded).keys() == vars(env).keys()


def test_normalizer_that_does_not_pickle(tmp_path):
    """The former file is kept if the normaliser cannot be pickled."""
    env, path = make_normalizer(), tmp_path / "vecnormalize.pkl"
    env.save(path)
    before = path.read_bytes()
    env.of_the_user = io.BytesIO().getbuffer()
    with pytest.raises(TypeError, match="pickle"):
        env.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_evaluations(tmp_path, monkeypatch):
    """`evaluations.npz` has all evaluations, and is whole at every moment, also if an evaluation fails."""
    callback = EvalCallback(make_toys(), eval_freq=16, n_eval_episodes=2, log_path=str(tmp_path), verbose=0)
    make_atomic([callback])
    model = PPOExt("MlpPolicy", make_toys(), **SMALL).learn(64, callback=callback)
    assert [path.name for path in tmp_path.iterdir()] == ["evaluations.npz"]
    assert np.load(tmp_path / "evaluations.npz")["timesteps"].tolist() == [32, 64]

    def fail(path, **kwargs):
        pathlib.Path(f"{path}.npz").write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(np, "savez", fail)
    with pytest.raises(OSError, match="No space"):
        model.learn(32, callback=callback)
    assert np.load(tmp_path / "evaluations.npz")["timesteps"].tolist() == [32, 64]
    assert [path.name for path in tmp_path.iterdir()] == ["evaluations.npz"]
    assert callback.log_path == str(tmp_path / "evaluations")


@pytest.mark.integration
def test_the_zoo_uses_them(train_here):
    """Environments and callbacks of a training of `ppo_ext` are replaced; those of other algorithms are not."""
    from rl_zoo3.exp_manager import ExperimentManager

    saved = []
    original = ExperimentManager.save_trained_model
    ExperimentManager.save_trained_model = lambda self, model: saved.append((self, model)) or original(self, model)
    try:
        for algo in ("ppo_ext", "ppo"):
            train_here(
                *("--env", "CartPole-v1", "-n", 64, "--eval-freq", 32),
                # With a setting that the model does not have, there is a `VecNormalize`.
                *("-params", "normalize:dict(epsilon=1e-8)", "n_steps:32"),
                algo=algo,
            )
    finally:
        ExperimentManager.save_trained_model = original
    ours, theirs = (
        [type(model.get_vec_normalize_env()), *(type(each) for each in experiment.callbacks if isinstance(each, EvalCallback))]
        for experiment, model in saved
    )
    assert [each.__module__ for each in theirs] == [VecNormalize.__module__, EvalCallback.__module__]
    assert ours[0].save is not VecNormalize.save
    assert ours[1].__name__ == "AtomicEvalCallback"
