"""The short form of `make memory`."""

import pytest
from host_memory import BPE, MAX_GROWTH_MIB, SETTLED, measured, training_figures


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alphabet", "kind", "num_mebibytes", "tokenizer", "most_mib"),
    # A short text stays in memory, beside tokens of two bytes; of bpe it is learning that takes memory.
    [("wide", ".txt", 60, (), 320), ("ascii", ".parquet", 400, (), 400), ("words", ".txt", 6, BPE, 400)],
)
def test_a_training_takes_a_bounded_amount_of_memory(alphabet, kind, num_mebibytes, tokenizer, most_mib):
    _, peak, _ = training_figures(alphabet, kind, num_mebibytes, *tokenizer)
    assert peak < most_mib


@pytest.mark.slow
def test_cells_in_one_process_leave_nothing():
    resident = measured("cells", SETTLED + 20)
    assert resident[-1] < resident[SETTLED - 1] + MAX_GROWTH_MIB
