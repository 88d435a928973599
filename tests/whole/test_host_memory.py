"""The short form of `make memory`."""

import pytest
from host_memory import MAX_GROWTH_MIB, SETTLED, measured, training_figures


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alphabet", "suffix", "num_mebibytes"),
    [("wide", ".txt", 64), ("ascii", ".parquet", 160)],
)
def test_a_training_takes_less_than_twice_its_corpus(alphabet, suffix, num_mebibytes):
    corpus, peak = training_figures(alphabet, suffix, num_mebibytes)
    assert peak < 2 * corpus


@pytest.mark.slow
def test_cells_in_one_process_leave_nothing():
    resident = measured("cells", SETTLED + 20)
    assert resident[-1] < resident[SETTLED - 1] + MAX_GROWTH_MIB
