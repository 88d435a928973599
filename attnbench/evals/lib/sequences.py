"""Training data of a task: batch n is a function of (seed, n)."""

import math
import time

import torch
from torch import Tensor

from attnbench.data.batches import block_order
from attnbench.evals.base import Probe
from attnbench.evals.lib.task_data import joined
from attnbench.machine.device import synchronize
from attnbench.training.step import Batch

CHUNK = 2**16
"""Sequences generated at a time."""

STREAMED_FROM = 2**20
"""Number of training sequences from which only a chunk is in memory. The first epoch then keeps the order of
generation, later ones shuffle each chunk; with fewer sequences every epoch shuffles all."""

NUM_BUCKETS = 8
"""Shapes of the batches of a task with length buckets; a captured step has a recording for each."""


class TrainingSequences:
    """Training sequences of a task on the device, stored as small integers, see `Batch.wide`.

    With `task.length_buckets` a batch has sequences of about one length. Lengths depend on the step alone, so that the
    batches of a stack have one shape, except at the borders of the buckets.

    Args:
        fills_last_batch: the last batch of an epoch has the rest of the sequences, and rows without labels; else these
            sequences, others in each epoch, are left out.
    """

    def __init__(self, task: Probe, seed: int, device: torch.device, *, fills_last_batch: bool = False) -> None:
        self.task, self.seed, self.device, self.fills_last_batch = task, seed, device, fills_last_batch
        # Load libraries before the timed generation.
        example = task.sequences("train", seed, 0, task.batch_size, device)
        self._widths = example.tokens_BT.shape[1], example.targets_BT.shape[1]
        self._is_at_every_position = self._widths[0] == self._widths[1]
        missing = -task.num_train_sequences % task.batch_size if fills_last_batch else 0
        self.batches_per_epoch = (task.num_train_sequences + missing) // task.batch_size
        is_streamed = task.num_train_sequences >= STREAMED_FROM
        self._batches_per_chunk = max(1, CHUNK // task.batch_size) if is_streamed else self.batches_per_epoch
        self._num_chunks = math.ceil(self.batches_per_epoch / self._batches_per_chunk)
        self._generated: tuple[int, Batch] | None = None
        self._at: tuple[int, int] | None = None
        self._ordered, self._buckets = example, []
        synchronize(device)
        started = time.perf_counter()
        first = self._generate(0)
        synchronize(device)
        self.tokens_per_second = first.tokens_BT.numel() / (time.perf_counter() - started)
        self.mean_length = float(self._widths[0])
        """Positions of a sequence up to its last label, with length buckets; else all."""
        if task.length_buckets:
            self.mean_length = float(self._lengths(first)[0].double().mean())

    def batch(self, step: int) -> Batch:
        epoch, index = divmod(step, self.batches_per_epoch)
        chunk, index = divmod(index, self._batches_per_chunk)
        if self._at != (epoch, chunk):
            self._order_chunk(epoch, chunk)
            self._at = epoch, chunk
        size = self.task.batch_size
        rows = self._ordered.rows(slice(index * size, (index + 1) * size))
        if not self.task.length_buckets:
            return rows
        num_positions, num_labels = (-(-width * self._buckets[index] // NUM_BUCKETS) for width in self._widths)
        weight, positions = (part[:, :num_labels] if part is not None else None for part in rows[2:4])
        return Batch(rows.tokens_BT[:, :num_positions], rows.targets_BT[:, :num_labels], weight, positions)

    def _order_chunk(self, epoch: int, chunk: int) -> None:
        batch, number, size = self._generate(chunk), epoch * self._num_chunks + chunk, self.task.batch_size
        num_rows = len(batch.tokens_BT)
        is_fresh = self._num_chunks > 1 and epoch == 0
        order_N = torch.arange(num_rows) if is_fresh else block_order(num_rows, self.seed, number)
        missing = -num_rows % size if self.fills_last_batch else 0
        order_N = torch.cat([order_N, order_N[:1].expand(missing)])[: (num_rows + missing) // size * size]
        order_N = order_N.to(self.device)
        if self.task.length_buckets:
            (length_N, label_N), (num_positions, num_labels) = self._lengths(batch), self._widths
            # The smallest bucket with room for all positions and all labels; a sequence may have a single label.
            bucket_N = -(-length_N * NUM_BUCKETS // num_positions)
            bucket_N = bucket_N.maximum((label_N - 1) * NUM_BUCKETS // num_labels + 1)
            order_N = order_N[bucket_N[order_N].argsort(stable=True)]
            # The same for every seed, so that the batches of a stack have one length.
            batches_N = block_order(len(order_N) // size, 0, number)
            order_N = order_N.view(-1, size)[batches_N.to(self.device)].flatten()
            self._buckets = bucket_N[order_N].view(-1, size).amax(1).tolist()
        self._ordered = batch.rows(order_N)
        if missing:
            assert self._ordered.weight_BT is not None
            self._ordered.weight_BT[-missing:] = 0
        if self._num_chunks > 1:
            self._generated = None

    def _generate(self, chunk: int) -> Batch:
        if self._generated is not None and self._generated[0] == chunk:
            return self._generated[1]
        start, end = 0, self.task.num_train_sequences
        # A single chunk has all sequences: each epoch's order decides which fill no batch.
        if self._num_chunks > 1:
            first, last = (min(n * self._batches_per_chunk, self.batches_per_epoch) for n in (chunk, chunk + 1))
            start, end = first * self.task.batch_size, min(end, last * self.task.batch_size)
        pieces = [
            self._narrow(self.task.sequences("train", self.seed, first, min(CHUNK, end - first), self.device))
            for first in range(start, end, CHUNK)
        ]
        batch = joined(pieces)
        if self._is_at_every_position and not _is_at_every_position(batch):
            if chunk:
                raise ValueError(f"{self.task}: labels of sequences {start} to {end} stand elsewhere than all before")
            self._is_at_every_position = False
        # Without positions the model gathers none, whose gradient would be slow.
        batch = batch._replace(positions_BL=None) if self._is_at_every_position else batch
        self._generated = chunk, batch
        return batch

    def _narrow(self, batch: Batch) -> Batch:
        symbol, position = (_smallest(bound) for bound in (self.task.vocabulary_size, self._widths[0]))
        weight, positions = batch.weight_BT, batch.positions_BL
        # A probe from outside may have weights between 0 and 1.
        if weight is not None and bool(((weight == 0) | (weight == 1)).all()):
            weight = weight.bool()
        positions = positions.to(position) if positions is not None else None
        return Batch(batch.tokens_BT.to(symbol), batch.targets_BT.to(symbol), weight, positions)

    def _lengths(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return positions and labels up to the last label of each sequence, (B,) both."""
        is_label_BL, position_BL = _labels(batch)
        label_BL = torch.arange(1, self._widths[1] + 1, device=self.device).expand_as(is_label_BL)
        return ((position_BL + 1) * is_label_BL).amax(1), (label_BL * is_label_BL).amax(1)


class MixedSequences(TrainingSequences):
    """Training sequences of a task's parts: each epoch has all batches of the first part, then those of the next.

    Each part is shuffled by itself, anew in every epoch, and all of its sequences are used: rows without labels fill
    its last batch, whose mean loss is that of the other rows.
    """

    def __init__(self, task: Probe, seed: int, device: torch.device) -> None:
        self.parts = [TrainingSequences(part, seed, device, fills_last_batch=True) for part in task.parts]
        self.batches_per_epoch = sum(part.batches_per_epoch for part in self.parts)
        positions = [part.batches_per_epoch * part.mean_length for part in self.parts]
        self.mean_length = sum(positions) / self.batches_per_epoch
        seconds = [number / part.tokens_per_second for part, number in zip(self.parts, positions, strict=True)]
        self.tokens_per_second = sum(positions) / sum(seconds)

    def batch(self, step: int) -> Batch:
        epoch, index = divmod(step, self.batches_per_epoch)
        number = 0
        while index >= self.parts[number].batches_per_epoch:
            index -= self.parts[number].batches_per_epoch
            number += 1
        part = self.parts[number]
        return part.batch(epoch * part.batches_per_epoch + index)


def training_sequences(task: Probe, seed: int, device: torch.device) -> TrainingSequences:
    return MixedSequences(task, seed, device) if task.parts else TrainingSequences(task, seed, device)


def _labels(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return which labels exist, and their positions, (B, L) both."""
    column_BL = torch.arange(batch.targets_BT.shape[1], device=batch.targets_BT.device).expand_as(batch.targets_BT)
    is_label_BL = batch.weight_BT > 0 if batch.weight_BT is not None else torch.ones_like(column_BL, dtype=torch.bool)
    return is_label_BL, batch.positions_BL.long() if batch.positions_BL is not None else column_BL


def _is_at_every_position(batch: Batch) -> bool:
    is_label_BL, position_BL = _labels(batch)
    column_L = torch.arange(position_BL.shape[1], device=position_BL.device)
    return bool(((position_BL == column_L) | ~is_label_BL).all())


def _smallest(bound: int) -> torch.dtype:
    return next(dtype for dtype in (torch.int8, torch.int16, torch.int32) if bound - 1 <= torch.iinfo(dtype).max)
