"""A call recorded once as a CUDA graph and then replayed, for launch-bound work."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class CapturedCall(Generic[Result]):
    """Function of tensors whose first calls run as they are, after which it is recorded once and then replayed.

    On the current CUDA device. The result of a call is overwritten by the next one.

    Args:
        function: reads nothing from the device. Tensors that it uses besides its inputs are used at their addresses: a
            change in place shows at the next call, a new tensor does not.
        others_ask: threads besides this one, as NCCL's watchdog, ask the device meanwhile, and may.

    Raises:
        ValueError: an input of another shape than the first one's.
    """

    NUM_WARMUP = 3
    """Ordinary calls before the recording, in which kernels are loaded and libraries allocate their workspaces."""

    def __init__(self, function: Callable[..., Result], *, others_ask: bool = False) -> None:
        self.function, self.num_calls = function, 0
        self.mode = "thread_local" if others_ask else "global"
        # Work warmed up on the default stream cannot be recorded. One stream: each has separate memory.
        self.stream = torch.cuda.Stream()
        self._recording: tuple[torch.cuda.CUDAGraph, list[Tensor], Result] | None = None

    def __call__(self, *inputs: Tensor) -> Result:
        self.num_calls += 1
        if self.num_calls <= self.NUM_WARMUP:
            return self._aside(*inputs)
        if self._recording is None:
            self._recording = self._record(*inputs)
        graph, recorded, result = self._recording
        for kept, given in zip(recorded, inputs, strict=True):
            if kept.shape != given.shape:
                raise ValueError(f"a captured call takes one shape, {tuple(kept.shape)}, not {tuple(given.shape)}")
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
            with torch.cuda.graph(graph, capture_error_mode=self.mode):
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
