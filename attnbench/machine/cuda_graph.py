import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

Result = TypeVar("Result")


class CapturedCall(Generic[Result]):
    """Function of tensors on the current CUDA device, for launch-bound work: first calls run eagerly, then it is
    recorded and replayed.

    A call overwrites the result of the one before. Each combination of input shapes has a recording; all share
    memory.

    Args:
        function: reads nothing from the device. It uses other tensors at their addresses: a change in place shows at
            the next call, a new tensor does not.
        others_ask: other threads, such as NCCL's watchdog, may query the device meanwhile.

    Raises:
        ValueError: more than MAX_SHAPES combinations of shapes.
    """

    MAX_SHAPES = 8
    NUM_WARMUP = 3
    """Eager calls before the first recording, which load kernels and allocate workspaces; further shapes have one."""

    def __init__(self, function: Callable[..., Result], *, others_ask: bool = False) -> None:
        self.function, self.num_calls = function, 0
        self.mode = "thread_local" if others_ask else "global"
        # Not the default stream, which cannot be recorded; one stream, as each has separate memory.
        self.stream = torch.cuda.Stream()
        self._recordings: dict[Any, tuple[torch.cuda.CUDAGraph, list[Tensor], Result] | None] = {}
        """By input shapes; None: called once."""
        _alive.add(self)

    def __call__(self, *inputs: Tensor) -> Result:
        self.num_calls += 1
        shapes = tuple(tensor.shape for tensor in inputs)
        if self.num_calls <= self.NUM_WARMUP or shapes not in self._recordings:
            self._recordings.setdefault(shapes)
            if len(self._recordings) > self.MAX_SHAPES:
                raise ValueError(f"a captured call takes {self.MAX_SHAPES} combinations of shapes, and these are more")
            return self._aside(*inputs)
        recording = self._recordings[shapes] or self._record(*inputs)
        self._recordings[shapes] = recording
        graph, recorded, result = recording
        for kept, given in zip(recorded, inputs, strict=True):
            kept.copy_(given)
        graph.replay()
        return result

    def _aside(self, *inputs: Tensor) -> Result:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = self.function(*inputs)
        torch.cuda.current_stream().wait_stream(self.stream)
        return result

    def _record(self, *inputs: Tensor) -> tuple[torch.cuda.CUDAGraph, list[Tensor], Result]:
        kept = [tensor.clone() for tensor in inputs]
        graph = torch.cuda.CUDAGraph()
        with collected():
            # A graph has separate memory: cached blocks of eager calls would double the peak.
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            pool = next((recording[0].pool() for recording in self._recordings.values() if recording), None)
            with torch.cuda.graph(graph, pool=pool, capture_error_mode=self.mode):
                result = self.function(*kept)
        return graph, kept, result


_alive: WeakSet[CapturedCall[Any]] = WeakSet()


def free_recordings() -> None:
    """Free the graphs of all calls; NCCL closes a communicator only after the graphs that hold its operations."""
    for call in list(_alive):
        call._recordings.clear()


@contextmanager
def collected() -> Iterator[None]:
    """Collect garbage now and none inside: freeing a graph while another is recorded makes CUDA fail."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
