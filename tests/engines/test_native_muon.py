"""Muon with `native`: all matrices of one shape at once, in float32."""

import pytest
import torch as th
from support.engines import assert_same_update, make

from sb3_ppo_ext.engines.native.muon import NativeMuonStepper, orthogonalized
from sb3_ppo_ext.engines.optimizer_steps import TorchStepper
from sb3_ppo_ext.update.optimizers import hidden_matrices

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
LR = 0.01
# Of different shapes, one of them tall
NETWORK = dict(net_arch=dict(pi=[16, 16, 16], vf=[16, 16, 24]))
OPTIONS = {
    "plain": {},
    "decay": dict(weight_decay=0.1),
    "rates apart": dict(critic_learning_rate=0.02),
    "no momentum": dict(policy_kwargs=dict(**NETWORK, optimizer_kwargs=dict(momentum=0.0))),
}


def make_muon(**options):
    return make(**{**dict(optimizer="muon", learning_rate=LR, policy_kwargs=NETWORK), **options})


def stepper_of(model):
    return model._find_engine().make_stepper(model._update_config())


def stepped(model, stepper, n_steps=3):
    """Norms of the gradients in some steps with random gradients."""
    generator, norms = th.Generator().manual_seed(0), []
    for group in model.policy.optimizer.param_groups:
        group["lr"] = LR * (2 if group["role"] == "critic" else 1)
    for _ in range(n_steps):
        stepper.zero_grad()
        for parameter in model.policy.parameters():
            gradient = th.randn(parameter.shape, generator=generator)
            if isinstance(stepper, TorchStepper):
                parameter.grad = gradient
            else:
                dict(stepper.memory.pairs)[parameter].copy_(gradient)
        norms.append({name: float(norm) for name, norm in stepper.clip(0.5).items()})
        stepper.step(True)
    stepper.step(False)  # changes nothing
    stepper.close()
    return norms


@pytest.mark.parametrize("case", OPTIONS)
def test_steps_are_torchs(case):
    """Steps, state and norms are those of PyTorch, of Muon's matrices up to the rounding to bfloat16."""
    model, other = make_muon(**OPTIONS[case]), make_muon(**OPTIONS[case])
    before, stepper = [parameter.clone() for parameter in model.policy.parameters()], stepper_of(model)
    assert type(stepper) is NativeMuonStepper
    norms, of_torch = stepped(model, stepper), stepped(other, TorchStepper(other.policy))
    for one, expected in zip(norms, of_torch, strict=True):
        assert one == pytest.approx(expected, rel=1e-5)
    of_muon = hidden_matrices(model.policy)
    assert len(of_muon) == 4
    triples = zip(model.policy.parameters(), other.policy.parameters(), before, strict=True)
    for own, expected, old in triples:
        if own in of_muon:
            # PyTorch's rounding, magnified by the iteration: `test_orthogonalized` has the exact result
            assert (own - expected).norm() < 2**-5 * (expected - old).norm()
        else:
            th.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)
    states, expected = (each.policy.optimizer.state_dict()["state"] for each in (model, other))
    assert states.keys() == expected.keys()
    for number, state in states.items():
        assert state.keys() == expected[number].keys()
        for name, value in state.items():
            th.testing.assert_close(value, expected[number][name], rtol=1e-5, atol=1e-6)


def test_updates_are_those_of_eager():
    """A whole update differs by less than a thousandth of the parameters."""
    assert_same_update(rtol=1e-3, optimizer="muon", policy_kwargs=NETWORK, critic_learning_rate=1e-3)


@pytest.mark.parametrize("shape", [(3, 16, 16), (1, 8, 24), (2, 24, 8)])
def test_orthogonalized(shape):
    """Each matrix of a batch is treated alone, as by Muon's polynomial of its singular values."""
    matrices = th.randn(shape, generator=th.Generator().manual_seed(0), dtype=th.float64)
    found = orthogonalized(matrices, COEFFICIENTS, 5, 1e-7)
    a, b, c = COEFFICIENTS
    for matrix, result in zip(matrices, found, strict=True):
        u, s, vh = th.linalg.svd(matrix / matrix.norm(), full_matrices=False)
        for _ in range(5):
            s = a * s + b * s**3 + c * s**5
        th.testing.assert_close(result, u @ th.diag(s) @ vh)
    single = orthogonalized(matrices.float(), COEFFICIENTS, 5, 1e-7)
    th.testing.assert_close(single, found.float(), atol=1e-5, rtol=1e-4)


def test_matrix_without_gradient():
    """It is not moved, and does not become NaN."""
    assert not orthogonalized(th.zeros(2, 4, 4), COEFFICIENTS, 5, 1e-7).any()


def test_optimizers_that_torch_steps():
    """PyTorch makes the steps where somebody has replaced or watches a step, or where the actor may be frozen."""
    assert type(stepper_of(make_muon())) is NativeMuonStepper
    assert type(stepper_of(make_muon(max_clip_fraction=0.5))) is TorchStepper
    model = make_muon()
    model.policy.optimizer.register_step_post_hook(lambda *_: None)
    assert type(stepper_of(model)) is TorchStepper
    model = make_muon()
    th.optim.lr_scheduler.LambdaLR(model.policy.optimizer, lambda step: 1.0)
    assert type(stepper_of(model)) is TorchStepper
    with pytest.warns(UserWarning, match="no hidden matrix"):
        assert type(stepper_of(make_muon(policy_kwargs=dict(net_arch=[8])))) is TorchStepper
