"""Batches of tokens: batch n as a function of (seed, n), and a whole split in order."""

import hashlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from attnbench.settings.errors import UserError

MAX_MOVED_BYTES = 4 * 2**30
"""Largest split that is kept on the device."""

RELEASED_ROWS = 64
"""Rows read between two calls of `release`; the system may map two mebibytes for each."""


class Batches:
    """Training batches of one split: batch n is a function of (seed, n).

    The split is cut into blocks of `seq_len`; targets are the inputs shifted by one. Every epoch takes each block once,
    in a new order, and drops those that do not fill a batch.

    Args:
        tokens_N: a split's tokens, moved to `device` once; above MAX_MOVED_BYTES each batch is moved instead.
        batch_size: rows of a batch over all ranks.
        rank: this process takes rows rank::num_ranks.
        release: called from time to time to give up the pages of a mapped split, see `Corpus.release`.
    """

    def __init__(
        self,
        tokens_N: Tensor,
        seq_len: int,
        batch_size: int,
        seed: int,
        device: torch.device | str,
        rank: int = 0,
        num_ranks: int = 1,
        release: Callable[[], None] | None = None,
    ) -> None:
        self.seq_len, self.batch_size, self.seed = seq_len, batch_size, seed
        self.rank, self.num_ranks = rank, num_ranks
        self.num_blocks = (len(tokens_N) - 1) // seq_len
        self.batches_per_epoch = self.num_blocks // batch_size
        if not self.batches_per_epoch:
            raise UserError(
                f"train.batch_size={batch_size}: at seq_len={seq_len} the train split has only {self.num_blocks}"
                " blocks; give a smaller train.batch_size, a smaller seq_len or a longer text"
            )
        if batch_size < num_ranks:
            raise UserError(f"train.batch_size={batch_size}: must be at least the number of processes, {num_ranks}")
        is_moved = tokens_N.nbytes <= MAX_MOVED_BYTES
        self.device, self.tokens_N = torch.device(device), tokens_N.to(device) if is_moved else tokens_N
        self.offsets_T = torch.arange(seq_len, device=self.tokens_N.device)
        self.release = release
        self._num_read = 0
        self._epoch: int | None = None
        self._order = torch.empty(0, dtype=torch.int64)

    def train_batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of this rank at `step` (from 0), (B, T) int64, without waiting for the device."""
        epoch, batch = divmod(step, self.batches_per_epoch)
        if epoch != self._epoch:
            self._order = block_order(self.num_blocks, self.seed, epoch).to(self.tokens_N.device)
            self._epoch = epoch
        blocks_B = self._order[batch * self.batch_size : (batch + 1) * self.batch_size][self.rank :: self.num_ranks]
        self._num_read += len(blocks_B)
        if self.release is not None and self._num_read >= RELEASED_ROWS:
            self._num_read = 0
            self.release()
        index_BT = blocks_B[:, None] * self.seq_len + self.offsets_T
        inputs_BT, targets_BT = self.tokens_N[index_BT].long(), self.tokens_N[index_BT + 1].long()
        return inputs_BT.to(self.device), targets_BT.to(self.device)


def block_order(num_blocks: int, seed: int, epoch: int) -> Tensor:
    """Return the order of the blocks in one epoch, (num_blocks,) int64 on the CPU."""
    # Hashed: with seed + epoch, neighbouring seeds would share orders.
    digest = hashlib.sha256(f"order of blocks, seed {seed}, epoch {epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randperm(num_blocks, generator=generator)


def evaluation_shape(num_tokens: int, seq_len: int, batch_size: int) -> tuple[int, int]:
    num_rows = math.ceil((num_tokens - 1) / seq_len)
    num_batches = math.ceil(num_rows / batch_size)
    return num_batches, math.ceil(num_rows / max(1, num_batches))


def evaluation_batches(tokens_N: Tensor, seq_len: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield a whole split in order: each of its N - 1 predictable tokens is a target of weight 1 exactly once.

    Inputs and targets are (B, T) int64, weights (B, T) float32, on the device of `tokens_N`, all of one shape with at
    most `batch_size` rows. Padding has weight 0, repeats the last token, and comes last in its row.
    """
    num_targets = len(tokens_N) - 1
    num_batches, num_rows = evaluation_shape(len(tokens_N), seq_len, batch_size)
    rows_B1 = torch.arange(num_rows, device=tokens_N.device)[:, None]
    offsets_T = torch.arange(seq_len, device=tokens_N.device)
    for batch in range(num_batches):
        index_BT = batch * num_rows * seq_len + rows_B1 * seq_len + offsets_T
        weight_BT = (index_BT < num_targets).float()
        index_BT = index_BT.clamp(max=num_targets - 1)
        yield tokens_N[index_BT].long(), tokens_N[index_BT + 1].long(), weight_BT
