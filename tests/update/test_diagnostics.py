"""What is logged of an update."""

import pytest
import torch as th
from support.toys import BOX_ACTION, record_log
from support.training import Recording, before_steps, logged, make


def test_diagnostics():
    """What is logged is what can be computed from the outside."""
    model = make(max_grad_norm=0.5, n_epochs=1, batch_size=32)
    log = record_log(model)
    norms, parameters = [], [*model.policy.parameters()]
    before_steps(model, lambda: norms.append(th.cat([p.grad.flatten() for p in parameters]).norm().item()))
    model.learn(32)
    values = logged(model)
    assert values["train/grad_norm"] > 0.5
    assert values["train/grad_norm_clipped"] == pytest.approx(norms[0], rel=1e-4) == pytest.approx(0.5)
    # One minibatch, before any step: the policy is still the one that collected.
    assert values["train/ratio_mean"] == pytest.approx(1, abs=1e-6)
    assert values["train/ratio_std"] == pytest.approx(0, abs=1e-6)
    assert values["train/ratio_max"] == pytest.approx(1, abs=1e-6)
    actions = model.rollout_buffer.actions
    outside = (actions <= BOX_ACTION.low) | (actions >= BOX_ACTION.high)
    assert values["train/actions_at_bounds"] == pytest.approx(outside.mean())
    assert 0 < values["train/actions_at_bounds"] < 1
    assert log.dumps[0]["time/rollout_seconds"] > 0
    assert values["time/update_seconds"] > 0


def test_ratio_statistics():
    """Statistics of the ratio are of the last epoch, over all samples."""
    model = make(Recording, n_epochs=2, learning_rate=0.01)
    model.learn(32)
    ratios = []
    for data, parameters in model.seen[4:]:
        model.policy.load_state_dict(parameters)
        with th.no_grad():
            _, log_prob, _ = model.policy.evaluate_actions(data.observations, data.actions)
        ratios.append((log_prob - data.old_log_prob).exp())
    ratios = th.cat(ratios)
    values = logged(model)
    assert values["train/ratio_mean"] == pytest.approx(ratios.mean().item(), rel=1e-5)
    assert values["train/ratio_std"] == pytest.approx(ratios.std(correction=0).item(), rel=1e-4)
    assert values["train/ratio_max"] == pytest.approx(ratios.max().item(), rel=1e-5)
