"""Training data of a task, on the device as a whole."""

import time

import torch

from attnbench.data.batches import block_order
from attnbench.evals.base import Task
from attnbench.machine.device import synchronize
from attnbench.training.step import Batch


class TrainingSequences:
    """A task's training data, all of it on the device; batch n is a function of (seed, n)."""

    def __init__(self, task: Task, seed: int, device: torch.device) -> None:
        self.task, self.seed, self.device = task, seed, device
        # A few first: what is loaded at the first use is no speed of the generator.
        task.sequences("train", seed, 0, task.batch_size, device)
        synchronize(device)
        started = time.perf_counter()
        self.all = task.sequences("train", seed, 0, task.num_train_sequences, device)
        synchronize(device)
        self.tokens_per_second = self.all.tokens_BT.numel() / (time.perf_counter() - started)
        self.batches_per_epoch = task.num_train_sequences // task.batch_size
        self._epoch, self._order = -1, torch.empty(0)
        self._last: tuple[int, Batch] | None = None

    def batch(self, step: int) -> Batch:
        """The batch of a step: every sequence once an epoch, in an order that each epoch has anew."""
        # In a stack several learning rates of a seed ask one after another.
        if self._last is not None and self._last[0] == step:
            return self._last[1]
        epoch, batch = divmod(step, self.batches_per_epoch)
        if epoch != self._epoch:
            self._order = block_order(self.task.num_train_sequences, self.seed, epoch).to(self.device)
            self._epoch = epoch
        rows = self.all.rows(self._order[batch * self.task.batch_size : (batch + 1) * self.task.batch_size])
        self._last = step, rows
        return rows
