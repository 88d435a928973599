"""The short form of `make fuzz`: a few hundred inputs a kind, the same every time."""

import pytest
from fuzz import fuzz
from fuzz_kinds import KINDS

NUM_INPUTS = {"texts": 300, "parquet": 400, "checkpoints": 100, "results": 200, "overrides": 100}


@pytest.mark.parametrize("kind", KINDS)
def test_every_input_is_read_or_refused_in_one_line(kind):
    counts, failures = fuzz(kind, NUM_INPUTS[kind])
    assert not failures, "\n\n".join(failures)
    # Neither would be a fuzz: one that only refuses sees no further than the first check.
    assert counts["clean"]
    assert counts["refused"]
