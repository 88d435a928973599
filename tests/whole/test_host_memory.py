"""The short form of `make memory`."""

import pytest
from host_memory import BPE, MAX_GROWTH_MIB, SETTLED, measured, training_figures


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alphabet", "kind", "num_mebibytes", "tokenizer"),
    [("wide", ".txt", 60, ()), ("ascii", ".parquet", 200, ()), ("words", ".txt", 6, BPE)],
)
def test_a_training_takes_less_than_twice_a_short_corpus_and_no_more_for_a_long_one(
    alphabet, kind, num_mebibytes, tokenizer
):
    _, peak, _ = training_figures(alphabet, kind, num_mebibytes, *tokenizer)
    # Of bpe it is learning that takes memory, a hundred times as much as different words have bytes.
    assert peak < (300 if tokenizer else 150)


@pytest.mark.slow
def test_cells_in_one_process_leave_nothing():
    resident = measured("cells", SETTLED + 20)
    assert resident[-1] < resident[SETTLED - 1] + MAX_GROWTH_MIB
