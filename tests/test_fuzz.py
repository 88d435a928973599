"""The short form of `make fuzz`: a few hundred inputs a kind, the same every time."""

import fuzz as fuzz_module
import pytest
from fuzz import fuzz
from fuzz_kinds import KINDS

from attnbench.evals.capped_child import CappedChild

NUM_INPUTS = {"texts": 300, "parquet": 400, "checkpoints": 100, "results": 200, "overrides": 100}


@pytest.mark.parametrize("kind", KINDS)
def test_every_input_is_read_or_refused_in_one_line(kind):
    counts, failures = fuzz(kind, NUM_INPUTS[kind])
    assert not failures, "\n\n".join(failures)
    # Neither would be a fuzz: one that only refuses sees no further than the first check.
    assert counts["clean"]
    assert counts["refused"]


def test_a_reader_that_cannot_start_is_not_started_for_every_input(monkeypatch):
    started = []

    class Dying(CappedChild):
        def ask(self, *question):
            started.append(question)
            raise RuntimeError("ended with exit code 1")

    monkeypatch.setattr(fuzz_module, "CappedChild", Dying)
    with pytest.raises(RuntimeError, match="texts: the reader died 20 times in a row, ended with exit code 1"):
        fuzz("texts", 5000)
    assert len(started) == 20
