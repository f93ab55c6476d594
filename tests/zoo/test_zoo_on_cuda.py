"""RL Zoo's commands on CUDA."""

import optuna
import pytest
import torch as th
from support.zoo import manager, saved, train

from sb3_ppo_ext import PPOExt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not th.cuda.is_available(), reason="no CUDA"),
    pytest.mark.filterwarnings("ignore:You are trying to run PPOExt on the GPU"),
]


@pytest.mark.integration
def test_zoo_on_cuda(tmp_path):
    """`--device cuda` trains on the GPU, and the zip loads on the CPU."""
    train("--env", "CartPole-v1", "-n", "600", "--device", "cuda", cwd=tmp_path)
    model = PPOExt.load(saved(tmp_path, "CartPole-v1"), device="cpu")
    assert {parameter.device.type for parameter in model.policy.parameters()} == {"cpu"}


def test_tuning_on_cuda(tmp_path):
    """Trials run on the GPU, and at least one completes."""
    experiment = manager(folder=tmp_path, optimize_hyperparameters=True, n_timesteps=100, device="cuda")
    experiment.setup_experiment()
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=15))
    study.optimize(experiment.objective, n_trials=2)
    assert "COMPLETE" in [trial.state.name for trial in study.trials]
