import torch

from attnbench.evals.base import Probe
from attnbench.evals.lib.sequences import TrainingSequences
from attnbench.training.step import Batch


def training_sequences(task: Probe, seed: int, device: torch.device) -> TrainingSequences:
    return MixedSequences(task, seed, device) if task.parts else TrainingSequences(task, seed, device)


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
