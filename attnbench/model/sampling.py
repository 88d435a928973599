"""Text from a trained model, token by token."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from attnbench.machine.cuda_graph import CapturedCall
from attnbench.machine.precision import dtype_of
from attnbench.mixers.base import State
from attnbench.model.language_model import LanguageModel
from attnbench.settings.errors import UserError

READ_LENGTH = 256
"""Most positions of a prompt read at a time, so that any mixer's prefill fits."""


class Sampling:
    """Choice of the next token from its logits, with noise from a generator on the device.

    Args:
        num_characters: number of first tokens that may be chosen.
        temperature: divisor of the logits; 0: greedy.
        top_k: number of most likely tokens to choose from; None: all.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        num_characters: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_characters, self.temperature = num_characters, temperature
        self.top_k = top_k if top_k is not None and top_k < num_characters else None
        self.generator = torch.Generator(device).manual_seed(seed)
        self.noise_BC = torch.ones(batch_size, num_characters, device=device)

    def draw(self) -> None:
        """Draw noise for one token, outside of `choose`, which may be recorded in a CUDA graph."""
        if self.temperature > 0:
            self.noise_BC.exponential_(generator=self.generator)

    def choose(self, logits_BC: Tensor) -> Tensor:
        """Choose the next token of each sequence: x / temperature - log(exponential noise) is the largest with the
        probability of softmax (Gumbel, 1954)."""
        logits_BC = logits_BC[:, : self.num_characters].float()
        if self.temperature == 0:
            return logits_BC.argmax(-1)
        if self.top_k is not None:
            least_B1 = logits_BC.topk(self.top_k).values[:, -1:]
            logits_BC = logits_BC.masked_fill(logits_BC < least_B1, -torch.inf)
        # The noise can be 0: infinite, its logarithm minus that of a weight of 0 would be NaN.
        return (logits_BC / self.temperature - self.noise_BC.clamp(min=1e-30).log()).argmax(-1)


class FiniteSampling(Sampling):
    """Refuses logits that are not finite."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.is_finite = torch.ones((), dtype=torch.bool, device=self.noise_BC.device)

    def choose(self, logits_BC: Tensor) -> Tensor:
        """Reads nothing from the device."""
        self.is_finite.logical_and_(logits_BC.isfinite().all())
        return super().choose(logits_BC)

    def checked(self, tokens: Iterator[Tensor], precision: str) -> Iterator[Tensor]:
        # A single text is printed as it is written, and waits for the device anyway.
        is_single = len(self.noise_BC) == 1
        for token_B in tokens:
            if is_single:
                self._check(precision)
            yield token_B
        self._check(precision)

    def _check(self, precision: str) -> None:
        if not self.is_finite:
            raise not_finite(precision)


def not_finite(precision: str) -> UserError:
    return UserError(f"the model's logits are not finite in {precision}: its weights are damaged, or too large for it")


class Writer:
    """Continuation of text through the mixers' states, one step a token.

    The caller sets the precision and turns gradients off while it writes.

    Args:
        max_length: most positions of prompt and text.
        dtype: of the caches.
        captured: replay the step as a CUDA graph.
    """

    def __init__(
        self,
        model: LanguageModel,
        sampling: Sampling,
        *,
        batch_size: int,
        max_length: int,
        dtype: torch.dtype,
        captured: bool,
    ) -> None:
        self.model, self.sampling = model, sampling
        self.state = model.init_state(batch_size, max_length, dtype)
        self.token_B = torch.zeros(batch_size, dtype=torch.int64, device=model.embedding.weight.device)
        self.batch_size, self.max_length, self.dtype = batch_size, max_length, dtype
        self.step = decoder(model, self.token_B, self.state, captured=captured, choose=sampling.choose)

    def write(self, prompt_BT: Tensor, num_tokens: int) -> Iterator[Tensor]:
        """Yield the tokens (B,) that follow the prompt on the device, reading nothing from it. Raises ValueError beyond
        `max_length` positions."""
        if prompt_BT.shape[1] + num_tokens > self.max_length:
            raise ValueError(f"{prompt_BT.shape[1]} + {num_tokens} positions: there is room for {self.max_length}")
        # In place, as a recorded step uses these tensors.
        fresh = self.model.init_state(self.batch_size, self.max_length, self.dtype)
        for layer, initial in zip(self.state, fresh, strict=True):
            for tensor, value in zip(layer, initial, strict=True):
                tensor.copy_(value)
        del fresh
        logits_BC = read(self.model, prompt_BT, self.state)
        self.sampling.draw()
        self.token_B.copy_(self.sampling.choose(logits_BC))
        yield self.token_B.clone()
        for _ in range(num_tokens - 1):
            self.sampling.draw()
            self.step()
            yield self.token_B.clone()


def read(model: LanguageModel, tokens_BT: Tensor, state: list[State]) -> Tensor:
    """Read tokens into a state in place, in pieces; return the logits (B, C) of the next token."""
    logits_BC = tokens_BT.new_empty(0)
    for piece_BT in tokens_BT.split(READ_LENGTH, dim=1):
        last_B1 = piece_BT.new_full((len(piece_BT), 1), piece_BT.shape[1] - 1)
        logits_BC = model(piece_BT, state, last_B1)[0][:, 0]
    return logits_BC


def greedily(logits_BC: Tensor) -> Tensor:
    return logits_BC.argmax(-1)


def decoder(
    model: LanguageModel,
    token_B: Tensor,
    state: list[State],
    *,
    captured: bool,
    choose: Callable[[Tensor], Tensor] = greedily,
) -> Callable[[], Tensor]:
    """Return a function that reads `token_B`, updates the state in place, chooses the next `token_B`, and returns its
    logits; `captured` replays the step as a CUDA graph."""

    def step() -> Tensor:
        logits_BC, _ = model.step(token_B, state)
        token_B.copy_(choose(logits_BC))
        return logits_BC

    return CapturedCall(step) if captured else step


def write_by_recomputation(
    model: LanguageModel, prompt_BT: Tensor, num_tokens: int, sampling: Sampling
) -> Iterator[Tensor]:
    """Yield the tokens of `Writer.write` without a state, reading the whole text for every token."""
    tokens_BT = prompt_BT
    for _ in range(num_tokens):
        last_B1 = tokens_BT.new_full((len(tokens_BT), 1), tokens_BT.shape[1] - 1)
        logits_BC = model(tokens_BT, None, last_B1)[0][:, 0]
        sampling.draw()
        token_B = sampling.choose(logits_BC)
        tokens_BT = torch.cat([tokens_BT, token_B[:, None]], dim=1)
        yield token_B


def continuation(
    model: LanguageModel,
    prompt_BT: Tensor,
    num_tokens: int,
    sampling: Sampling,
    precision: str,
    *,
    captured: bool = False,
) -> Iterator[Tensor]:
    """Return the tokens (B,) that follow a prompt, from the model's state or, without one, by recomputation."""
    if model.backend_without_state:
        return write_by_recomputation(model, prompt_BT, num_tokens, sampling)
    batch_size, length = prompt_BT.shape
    dtype, max_length = dtype_of(precision), length + num_tokens
    writer = Writer(model, sampling, batch_size=batch_size, max_length=max_length, dtype=dtype, captured=captured)
    return writer.write(prompt_BT, num_tokens)
