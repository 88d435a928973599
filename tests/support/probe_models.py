"""Models made up for the tests of probes' scores."""

from collections.abc import Callable

import torch


class Answering(torch.nn.Module):
    """Answer at each label as `answer` does from the symbols up to it; keep a state of so many bytes."""

    backend_without_state = None

    def __init__(self, num_symbols: int, answer: Callable[[list[int]], int], state: int = 0) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(num_symbols, 1)
        self.answer, self.state = answer, state

    def init_state(self, batch_size: int, length: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        return [[torch.zeros(self.state, dtype=torch.uint8)]]

    def forward(self, tokens_BT, state=None, positions_BL=None):
        answers_BL = torch.tensor(
            [
                [self.answer(tokens[: place + 1]) for place in places]
                for tokens, places in zip(tokens_BT.tolist(), positions_BL.tolist(), strict=True)
            ]
        )
        return torch.nn.functional.one_hot(answers_BL, self.embedding.num_embeddings).float(), None
