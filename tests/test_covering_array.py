"""Any two of engine, policy, actions, kind of environment and options are trained together as by the reference, or refused."""

import itertools

import pytest
from support.covering import CELLS, ITEMS, ROOMS, completions, items_of, make, options_of
from support.device_training import same_draws
from support.engines import assert_same_results, updated
from support.options import assert_trains_on
from support.parity import assert_equal

pytestmark = pytest.mark.integration

same_draws = pytest.fixture(same_draws)


def test_each_pair_is_in_a_cell_or_refused():
    """Two items that no cell has together cannot be trained together, whatever else a cell has; most pairs can be."""
    pairs = {pair for pair in itertools.combinations(range(len(ITEMS)), 2) if len({ITEMS[i][0] for i in pair}) == 2}
    trained = {pair for cell in CELLS for pair in itertools.combinations(sorted(items_of(cell)), 2)}
    assert len(pairs) > 2000
    assert len(trained & pairs) > 0.95 * len(pairs)
    for pair in pairs - trained:
        assert not list(completions(dict(ITEMS[i] for i in pair))), pair


def of(*engines):
    """Cells of these engines, with what they consist of as their names."""
    cells = [cell for cell in CELLS if cell["engine"] in engines]
    return pytest.mark.parametrize("cell", cells, ids=lambda cell: f"{[cell[room] for room in ROOMS]}, {options_of(cell)}")


def trained_as_reference(cell, device="cpu"):
    """A model that is trained as by the reference, and reproducibly."""
    model = make(cell, device).learn(32)
    if cell["engine"] in ("eager", "native") or "amp_dtype" in cell:  # The others are reproduced by the reference.
        assert_equal(bits(make(cell, device).learn(32)), bits(model), "a second training")
    if "amp_dtype" not in cell:
        assert_same_results(*with_reference(cell, model), rtol=tolerance(cell))
    return model


def tolerance(cell):
    """Relative tolerance of the parameters."""
    # Muon divides each matrix by its singular values, small ones included.
    return 1e-4 if cell.get("optimizer") == "muon" else 1e-5


def bits(model):
    return model.policy.state_dict(), model.policy.optimizer.state_dict()["state"]


def with_reference(cell, model):
    """What the eager engine makes of the cell, and what the cell's makes of it."""
    if cell["engine"] == "native":  # It may draw other actions.
        eager, native = (make(cell, backend="eager").learn(16) for _ in range(2))
        for each in (eager, native):
            each._current_progress_remaining = 0.5  # At the end, schedules are 0.
        return updated(eager, "eager"), updated(native, "native")
    return (model if cell["engine"] == "eager" else make(cell, backend="eager").learn(32)), model


@pytest.mark.usefixtures("same_draws")
@of("eager", "fused", "native", "device")
def test_cell(cell):
    """Each cell trains as the reference does, reproducibly, and goes on from a zip."""
    model = trained_as_reference(cell)
    assert_trains_on(model, has_memory=cell["policy"] in ("lstm", "gru", "transformer"))


@pytest.mark.filterwarnings("ignore:You are trying to run PPOExt on the GPU")
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.usefixtures("same_draws")
@of("sim")
def test_cell_on_a_device(sim, cell):
    """On a simulated device each cell trains as the reference does on the CPU."""
    trained_as_reference(cell, sim.name)
