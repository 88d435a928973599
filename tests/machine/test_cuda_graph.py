"""Recording of CUDA graphs beside what the garbage collector does."""

import gc

import pytest
import torch

from attnbench.machine.cuda_graph import CapturedCall, collected, free_recordings


class Cycle:
    """Garbage that only the collector frees."""

    def __init__(self, freed: list[str], name: str, held: object = None) -> None:
        self.freed, self.name, self.held, self.itself = freed, name, held, self

    def __del__(self) -> None:
        self.freed.append(self.name)


@pytest.fixture
def eager():
    before = gc.get_threshold()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*before)


def test_no_garbage_is_freed_during_a_recording(eager):
    freed: list[str] = []
    with collected():
        Cycle(freed, "inside")
        _ = [[] for _ in range(100)]
        assert freed == []
    _ = [[] for _ in range(100)]
    assert freed == ["inside"]


def test_what_was_garbage_before_is_freed_first_and_the_collector_is_left_as_it_was():
    freed: list[str] = []
    gc.disable()
    try:
        Cycle(freed, "before")
        with collected():
            assert freed == ["before"]
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(ValueError, match="inside"), collected():
        raise ValueError("inside")
    assert gc.isenabled()


def test_recordings_can_be_freed_while_their_calls_are_still_in_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    call, freed = CapturedCall(lambda: None), list[str]()
    call._recordings["shapes"] = Cycle(freed, "graph")  # pyright: ignore[reportArgumentType]
    free_recordings()
    gc.collect()
    assert freed == ["graph"]


@pytest.mark.gpu
def test_a_graph_that_is_garbage_does_not_break_the_recording_of_another(eager):
    other = torch.cuda.CUDAGraph()
    with torch.cuda.graph(other):
        torch.zeros(1, device="cuda")
    gc.disable()
    Cycle([], "graph", other)
    del other
    gc.enable()

    def doubled(x):
        # Many objects, so that the collector would begin here.
        _ = [[] for _ in range(100)]
        return x * 2

    call = CapturedCall(doubled)
    for number in range(CapturedCall.NUM_WARMUP + 3):
        assert call(torch.full((4,), float(number), device="cuda")).tolist() == [2.0 * number] * 4


@pytest.mark.gpu
def test_every_combination_of_shapes_has_a_recording_and_there_are_eight_at_most():
    seen = []

    def added(x, y):
        seen.append(x.shape[0])
        return x + y.sum()

    call = CapturedCall(added)
    for round_ in range(4):
        for length in (3, 1, 2):
            x, y = torch.full((length,), float(round_), device="cuda"), torch.ones(length, device="cuda")
            assert call(x, y).tolist() == [round_ + length] * length
    # The first calls as they are, each shape once before its recording, and once in it.
    assert sorted(seen) == [1, 1, 2, 2, 3, 3]
    for length in range(4, 9):
        call(torch.ones(length, device="cuda"), torch.ones(length, device="cuda"))
    with pytest.raises(ValueError, match="8 combinations"):
        call(torch.ones(9, device="cuda"), torch.ones(9, device="cuda"))
