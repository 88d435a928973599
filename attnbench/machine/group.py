"""Processes of one host that train one model: they agree on integers (by gloo) and sum tensors (by NCCL on GPUs)."""

import atexit
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from attnbench.machine.cuda_graph import free_recordings
from attnbench.machine.device import all_gpus, resolve_device
from attnbench.machine.ranks import Ranks
from attnbench.settings.errors import UserError, memory_reason, one_line

STEP_TIMEOUT = timedelta(minutes=30)
"""Longest wait for another rank in a step, which may compile, and of rank 0 for the others. A rank that ends closes
its connections, which ends the wait at once."""
WORD_TIMEOUT = timedelta(days=30)
"""Longest wait for rank 0, which meanwhile validates and evaluates."""
BUCKET_ELEMENTS = 2**22
"""Fewest elements of one reduction: enough to hide its latency, few enough to overlap with the backward pass."""
LOOK_SECONDS = 2e-4
"""Time between two queries of the device and the other processes while the host waits."""
CLOSED = ("closed by peer", "reset by peer", "Broken pipe")
"""Phrases in gloo's errors when a rank has ended."""


class LostError(UserError):
    """Another process of the training has ended, or does not answer."""


class Group:
    """All processes of a training.

    Args:
        device_type: cuda or cpu; on cuda each rank has the GPU of its number.

    Attributes:
        is_lost: a rank has ended or left within a step; agreement is impossible.
    """

    def __init__(self, ranks: Ranks, device_type: str) -> None:
        self.rank, self.size = ranks.rank, ranks.size
        self.backend = "nccl" if device_type == "cuda" else "gloo"
        self.is_lost = False
        # The host's name need not resolve, and other interfaces may have a firewall.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        device = None
        if device_type == "cuda":
            device = torch.device("cuda", self.rank)
            # For kernels, graphs and NCCL.
            torch.cuda.set_device(device)
        try:
            dist.init_process_group(self.backend, timeout=STEP_TIMEOUT, device_id=device)
            self._words = dist.new_group(backend="gloo", timeout=WORD_TIMEOUT if ranks.follows else STEP_TIMEOUT)
        except (RuntimeError, ValueError) as error:
            raise LostError(f"the {self.size} processes of torchrun do not meet ({one_line(error)})") from error
        assert dist.group.WORLD is not None
        self._tensors = dist.group.WORLD
        atexit.register(self._leave)
        process_ids = self.agree(*(os.getpid() if rank == self.rank else 0 for rank in range(self.size)))
        self._others = [process_id for process_id in process_ids if process_id != os.getpid()]

    def agree(self, *words: int) -> list[int]:
        """Return the maxima of all ranks' integers of 63 bits, once every rank has given its own. As all methods here,
        it raises LostError if a rank has ended."""
        tensor = torch.tensor(words, dtype=torch.int64)
        with self._watched():
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._words)
        return tensor.tolist()

    @contextmanager
    def adding_up(self, tensor: Tensor, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Replace a tensor, and the gradients of the backward pass inside, by their sums over all ranks.

        Buckets of gradients are sent during the backward pass, in its order, which is the same on every rank. Sums are
        bit-equal on all ranks. The work can be captured in a CUDA graph. On GPUs a lost rank shows only when the host
        waits.
        """
        bucket, under_way = [tensor], []

        def send() -> None:
            # Coalesced; one flat tensor would have to be written and read back.
            with self._watched():
                under_way.append(self._tensors.allreduce_coalesced(bucket))
            bucket.clear()

        def completed(parameter: Tensor) -> None:
            assert parameter.grad is not None
            if bucket and bucket[0].dtype != parameter.grad.dtype:
                send()
            bucket.append(parameter.grad)
            if sum(tensor.numel() for tensor in bucket) >= BUCKET_ELEMENTS:
                send()

        hooks = [parameter.register_post_accumulate_grad_hook(completed) for parameter in parameters]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        with record_function("reduction"):
            if bucket:
                send()
            with self._watched():
                for work in under_way:
                    work.wait()

    def share(self, tensors: Sequence[Tensor]) -> None:
        with self._watched(), torch.no_grad():
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def wait(self, device: torch.device) -> None:
        """Wait while all ranks live; on a CPU the host has waited already."""
        if device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
            self.wait_until(done.query)

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Wait for work of all ranks; NCCL alone would wait for ever for a rank that has ended."""
        while not is_done():
            if not all(_lives(process_id) for process_id in self._others):
                raise self._lost("has ended")
            time.sleep(LOOK_SECONDS)

    def _lost(self, what: str) -> LostError:
        self.is_lost = True
        return LostError(
            f"another of the {self.size} processes {what}; the same command resumes from the last checkpoint"
        )

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if memory_reason(error) is not None:
                raise
            has_ended = any(words in str(error) for words in CLOSED)
            raise self._lost("has ended" if has_ended else f"does not answer ({one_line(error)})") from error

    def _leave(self) -> None:
        if not self.is_lost:
            free_recordings()
            dist.destroy_process_group()
        elif self.backend == "nccl":
            # A kernel that waits for the lost rank would block the exit.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


def _lives(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def device_type_of(name: str, ranks: Ranks) -> str:
    device = resolve_device(name)
    if device.type == "cpu":
        return device.type
    if device.index is not None:
        raise UserError(f"device={name}: each of the {ranks.size} processes has a GPU of its own; device=cuda or auto")
    kinds = all_gpus(device, "torchrun")
    if len(kinds) < ranks.size:
        raise UserError(
            f"torchrun --nproc_per_node={ranks.size}: this machine has {len(kinds)} CUDA devices, and each process "
            "needs one; device=cpu works without"
        )
    return device.type


@cache
def join(ranks: Ranks, device_type: str) -> Group:
    """Make the group once for all jobs of a sweep; waits for all ranks."""
    return Group(ranks, device_type)
