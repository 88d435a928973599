"""A call recorded once as a CUDA graph and then replayed, for work so small that it waits for the host."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class CapturedCall(Generic[Result]):
    """A function of tensors whose first calls run as they are, after which it is recorded once and then replayed.

    On the current CUDA device. What a call returns is overwritten by the next one.

    Args:
        function: reads nothing from the device. What it uses besides its inputs is used where it lies: changed in place
            it is seen at the next call, put elsewhere it is not.

    Raises:
        ValueError: an input of another shape than the first one's.
    """

    NUM_WARMUP = 3
    """Ordinary calls before the recording, in which kernels are loaded and libraries allocate their workspaces."""

    def __init__(self, function: Callable[..., Result]) -> None:
        self.function, self.num_calls = function, 0
        # What was warmed up on the default stream cannot be recorded. One stream: each has memory of its own.
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
        # The graph's memory is its own. What the ordinary calls left in the allocator would double the peak.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = self.function(*kept)
        return graph, kept, result
