"""A call recorded as a CUDA graph and then replayed, for launch-bound work."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class CapturedCall(Generic[Result]):
    """Function of tensors whose first calls run as they are, after which it is recorded and then replayed.

    On the current CUDA device. The result of a call is overwritten by the next one. Each combination of its inputs'
    shapes has a recording; all share the memory of the largest.

    Args:
        function: reads nothing from the device. Tensors that it uses besides its inputs are used at their addresses: a
            change in place shows at the next call, a new tensor does not.
        others_ask: threads besides this one, as NCCL's watchdog, ask the device meanwhile, and may.

    Raises:
        ValueError: inputs of more than MAX_SHAPES combinations of shapes.
    """

    MAX_SHAPES = 8
    NUM_WARMUP = 3
    """Ordinary calls before the first recording, in which kernels are loaded and libraries allocate their workspaces;
    further shapes have one."""

    def __init__(self, function: Callable[..., Result], *, others_ask: bool = False) -> None:
        self.function, self.num_calls = function, 0
        self.mode = "thread_local" if others_ask else "global"
        # Work warmed up on the default stream cannot be recorded. One stream: each has separate memory.
        self.stream = torch.cuda.Stream()
        self._recordings: dict[Any, tuple[torch.cuda.CUDAGraph, list[Tensor], Result] | None] = {}
        """By the shapes of the inputs; None: called once."""

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
            # A graph has separate memory: the rest of the ordinary calls in the allocator would double the peak.
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            pool = next((recording[0].pool() for recording in self._recordings.values() if recording), None)
            with torch.cuda.graph(graph, pool=pool, capture_error_mode=self.mode):
                result = self.function(*kept)
        return graph, kept, result


@contextmanager
def collected() -> Iterator[None]:
    """Collect garbage now and none inside: a graph that is garbage may not be freed while another is recorded, which
    CUDA then gives up."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
