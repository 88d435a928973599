from torch import Tensor


class Chunked:
    """Sizes that follow from the shape of the log decay, (B, T, H, ...), and the positions per chunk."""

    __slots__ = ()
    log_decay: Tensor
    num_heads: int
    chunk: int

    @property
    def length(self) -> int:
        return self.log_decay.shape[1]

    @property
    def sequences(self) -> int:
        """Sequences × heads."""
        return self.log_decay.shape[0] * self.num_heads

    @property
    def num_chunks(self) -> int:
        return -(-self.length // self.chunk)

    @property
    def all_chunks(self) -> int:
        return self.sequences * self.num_chunks
