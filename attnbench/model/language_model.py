"""Language model around a mixer: pre-norm blocks, SwiGLU, no positions.

Dropout is on the embedding and the output of each branch, as in GPT-2, but not on attention weights, which most mixers
lack."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnbench.machine.device import on_kernels
from attnbench.mixers.base import Mixer, State
from attnbench.mixers.layers import FeedForward, LayerNorm, RMSNorm
from attnbench.model.dropout import EMBEDDING, FEED_FORWARD, MIXER, drop, layer_keys

NORMS: dict[str | None, Callable[[int], nn.Module]] = {None: RMSNorm, "layer": LayerNorm}
"""Norms of the residual stream, by `model.norm`."""


class Block(nn.Module):
    """x + mixer(norm(x)), then x + feed_forward(norm(x)) if there is a feed-forward.

    With a doubled residual, as in Zoology's models, a block without feed-forward ends with x + norm(x).
    """

    def __init__(
        self,
        mixer: Mixer,
        dim: int,
        feed_forward_width: int,
        dropout: float,
        norm: str | None = None,
        doubled_residual: bool = False,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        has_feed_forward = feed_forward_width > 0 and not mixer.replaces_feed_forward
        self.mixer_norm = NORMS[norm](dim)
        self.mixer = mixer
        self.feed_forward_norm = NORMS[norm](dim) if has_feed_forward or doubled_residual else None
        self.feed_forward: nn.Module | None = nn.Identity() if doubled_residual else None
        if has_feed_forward:
            self.feed_forward = FeedForward(dim, feed_forward_width)

    def forward(
        self, x_BTD: Tensor, state: State | None = None, dropout_B: Tensor | None = None
    ) -> tuple[Tensor, State | None]:
        """Return the residual stream after the block, and the state. `dropout_B`: see `dropout.layer_keys`."""
        x_BTD, branch_BTD, state = self.summands(x_BTD, state, dropout_B)
        return x_BTD + branch_BTD, state

    def summands(
        self, x_BTD: Tensor, state: State | None, dropout_B: Tensor | None
    ) -> tuple[Tensor, Tensor, State | None]:
        """Return the residual stream before the block's last branch, that branch's output, and the state."""
        mixed_BTD, state = self.mixer(self.mixer_norm(x_BTD), state)
        mixed_BTD = drop(mixed_BTD, self.dropout, dropout_B, MIXER)
        if self.feed_forward is None or self.feed_forward_norm is None:
            return x_BTD, mixed_BTD, state
        x_BTD = x_BTD + mixed_BTD
        fed_BTD = self.feed_forward(self.feed_forward_norm(x_BTD))
        return x_BTD, drop(fed_BTD, self.dropout, dropout_B, FEED_FORWARD), state

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        mixed_BD, state = self.mixer.step(self.mixer_norm(x_BD), state)
        return self.feed(x_BD + mixed_BD), state

    def forward_flops(self, length: int) -> int | None:
        of_mixing = self.mixer.mixing_flops(length)
        matrices = sum(parameter.numel() for parameter in self.parameters() if parameter.dim() > 1)
        return None if of_mixing is None else 2 * matrices * length + of_mixing

    def feed(self, x: Tensor) -> Tensor:
        if self.feed_forward is None or self.feed_forward_norm is None:
            return x
        return x + self.feed_forward(self.feed_forward_norm(x))


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Do nothing: `init_weights` does, and on the meta device torch would load its compiler."""

    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        nn.init.normal_(self.weight, std=0.02, generator=generator)


class LanguageModel(nn.Module):
    """Language model: tokens in, logits of the next token out.

    Args:
        mixers: one a layer.
        feed_forward_width: hidden channels of the SwiGLU; 0 for none.
        dropout: share of elements dropped in forward passes with keys of rows.
        norm: of the residual stream, see NORMS.
        untied: the logits have weights of their own, not the embedding's.
        dropout_of: "embedding": nothing else is dropped from; None: the branches too.
        doubled_residual: see Block.
    """

    def __init__(
        self,
        mixers: Sequence[Mixer],
        *,
        vocabulary_size: int,
        dim: int,
        feed_forward_width: int,
        dropout: float = 0.0,
        norm: str | None = None,
        untied: bool = False,
        dropout_of: str | None = None,
        doubled_residual: bool = False,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        of_branches = dropout if dropout_of is None else 0.0
        self.embedding = Embedding(vocabulary_size, dim)
        shape = (dim, feed_forward_width, of_branches, norm, doubled_residual)
        self.blocks = nn.ModuleList(Block(mixer, *shape) for mixer in mixers)
        self.norm = NORMS[norm](dim)
        self.head = Embedding(vocabulary_size, dim) if untied else None
        self.feed_forward_width = feed_forward_width

    @property
    def layers(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

    def forward(
        self, tokens_BT: Tensor, state: list[State] | None = None, positions_BL: Tensor | None = None
    ) -> tuple[Tensor, list[State] | None]:
        """Return logits (B, T, vocabulary), or (B, L, vocabulary) at `positions_BL`, and the last state."""
        x_BTD, state = self.hidden(tokens_BT, state, positions_BL)
        return self.logits(x_BTD), state

    def hidden(
        self,
        tokens_BT: Tensor,
        state: list[State] | None = None,
        positions_BL: Tensor | None = None,
        dropout_B: Tensor | None = None,
    ) -> tuple[Tensor, list[State] | None]:
        """Return the hidden states before the logits, (B, T, D) or (B, L, D), and the last state. `dropout_B`: see
        `dropout.row_keys`."""
        return self.through(self.enter(tokens_BT, dropout_B), state, positions_BL, dropout_B)

    def through(
        self,
        x_BTD: Tensor,
        state: list[State] | None = None,
        positions_BL: Tensor | None = None,
        dropout_B: Tensor | None = None,
    ) -> tuple[Tensor, list[State] | None]:
        """Compute `hidden` from embedded tokens (B, T, D)."""
        states: list[State] = []
        for index, block in enumerate(self.blocks):
            x_BTD, after = block(x_BTD, state[index] if state is not None else None, layer_keys(dropout_B, index))
            states.append(after)
        return self.leave(x_BTD, positions_BL), (states if state is not None else None)

    def enter(self, tokens_BT: Tensor, dropout_B: Tensor | None) -> Tensor:
        """Return the input of the first block, (B, T, D)."""
        return drop(self.embed(tokens_BT), self.dropout, layer_keys(dropout_B, 0), EMBEDDING)

    def leave(self, x_BTD: Tensor, positions_BL: Tensor | None) -> Tensor:
        """Return the hidden states after the last block, all or at the positions."""
        if positions_BL is not None:
            x_BTD = x_BTD.gather(1, positions_BL[..., None].expand(-1, -1, x_BTD.shape[-1]))
        return self.norm(x_BTD)

    def step(self, tokens_B: Tensor, state: list[State]) -> tuple[Tensor, list[State]]:
        """Return logits (B, vocabulary) after one more token, reading nothing from the device."""
        return self.step_from(self.embed(tokens_B), state)

    def step_from(self, x_BD: Tensor, state: list[State]) -> tuple[Tensor, list[State]]:
        states = []
        for block, before in zip(self.layers, state, strict=True):
            x_BD, after = block.step(x_BD, before)
            states.append(after)
        return self.logits(self.norm(x_BD)), states

    @property
    def readout(self) -> Embedding:
        return self.embedding if self.head is None else self.head

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(x, self.readout.weight)

    def embed(self, tokens: Tensor) -> Tensor:
        """Under autocast in the compute dtype: moving float32, which every layer rounds off, would take a tenth of a
        step."""
        weight, device = self.embedding.weight, tokens.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        if not (on_kernels(weight) and torch.is_grad_enabled()):
            return self.embedding(tokens).to(dtype)
        from attnbench.ops.layers.triton.embedding import embed

        return embed(tokens.flatten(), weight, dtype).unflatten(0, tokens.shape)

    @property
    def num_branches(self) -> int:
        """Outputs added to the residual stream: two a layer, one without feed-forward."""
        return sum(1 if block.feed_forward is None else 2 for block in self.layers)

    @property
    def backend_without_state(self) -> str:
        """Name of a layer's backend that only trains, so that the model cannot decode; else ""."""
        # A mixer with one backend may not keep its name.
        backends = ((block.mixer, getattr(block.mixer, "backend", block.mixer.backends[0])) for block in self.layers)
        return next((backend for mixer, backend in backends if backend in mixer.trains_only), "")

    def init_state(self, batch_size: int, max_length: int, dtype: torch.dtype) -> list[State]:
        return [block.mixer.init_state(batch_size, max_length, dtype) for block in self.layers]

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def forward_flops(self, length: int, num_logits: int | None = None) -> int | None:
        """Count operations of a forward pass over one sequence, a multiply-add as 2; None if a mixer does not count.

        Every weight matrix is used once a token (short convolutions too), that of the logits at `num_logits` positions
        (None: all); the mixers count their mixing.
        """
        of_blocks = [block.forward_flops(length) for block in self.layers]
        of_logits = 2 * self.readout.weight.numel() * (length if num_logits is None else num_logits)
        return None if None in of_blocks else of_logits + sum(filter(None, of_blocks))

    def undecayed(self) -> set[str]:
        undecayed = ((name, getattr(module, "no_weight_decay", ())) for name, module in self.named_modules())
        return {f"{name}.{parameter}" for name, parameters in undecayed for parameter in parameters}
