"""Mixers as people write them outside attnbench, right and deliberately wrong."""

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from broken_mixers import LosesTheTail
from torch import Tensor

from attnbench.mixers.base import Mixer, head_count
from attnbench.mixers.layers import Projection, RMSNorm
from attnbench.settings.registry import trust
from attnbench.settings.schema import MixerSettings


def settings_of(kind: str) -> dict[str, Any]:
    """A run's settings that name a class of this file, which may be built from here on."""
    target = f"{__name__}.{kind}"
    mixer = MixerSettings(name="mine", target=target, options={"backend": "auto"})
    trust([target])
    return {"mixer": mixer}


class DeltaState(NamedTuple):
    memory_BHKV: Tensor


class SeparateProjections(Mixer):
    """M_t = d M_(t-1) + f(k_t) v_t^T, y_t = norm(M_t^T f(q_t)), f(x) = elu(x) + 1, a projection each for q, k and v.

    At a single position the norm takes away all that query and key do.
    """

    decay: ClassVar[float] = 0.9

    def __init__(self, *, dim: int, head_width: int, backend: str = "auto") -> None:
        super().__init__()
        self.head_width, self.num_heads = head_width, head_count(None, dim, head_width)
        self.query, self.key, self.value = Projection(dim, dim), Projection(dim, dim), Projection(dim, dim)
        self.norm = RMSNorm(head_width)
        self.output = Projection(dim, dim, residual=True)

    def forward(self, x_BTD: Tensor, state: DeltaState | None = None) -> tuple[Tensor, DeltaState | None]:
        query, key, value = self._heads(x_BTD)
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        memory = torch.zeros_like(x_BTD[:, 0, :1], dtype=wide)[..., None, None] if state is None else state.memory_BHKV
        mixed = []
        for t in range(x_BTD.shape[1]):
            memory = self._decay(x_BTD, t) * memory + (key[:, t, :, :, None] * value[:, t, :, None, :]).to(wide)
            mixed.append((query[:, t, :, None, :].to(wide) @ memory).squeeze(-2))
        if state is not None:
            state.memory_BHKV.copy_(memory)
        return self.output(self.norm(torch.stack(mixed, dim=1).to(x_BTD.dtype)).flatten(2)), state

    def _heads(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (
            part(x_BTD).unflatten(-1, (self.num_heads, self.head_width)) for part in (self.query, self.key, self.value)
        )
        return F.elu(query) + 1, F.elu(key) + 1, value

    def _decay(self, x_BTD: Tensor, t: int) -> Tensor | float:
        return self.decay

    def reference(self, x_BTD: Tensor) -> Tensor:
        return SeparateProjections.forward(self, x_BTD)[0]

    def init_state(self, batch_size: int, max_length: int, dtype: torch.dtype) -> DeltaState:
        shape = (batch_size, self.num_heads, self.head_width, self.head_width)
        wide = torch.promote_types(dtype, torch.float32)
        return DeltaState(torch.zeros(shape, dtype=wide, device=self.output.weight.device))

    def mixing_flops(self, length: int) -> int:
        return length * self.num_heads * 5 * self.head_width**2


class LosesTheQuery(SeparateProjections):
    """A forward pass whose gradient of the query is wrong behind the last whole chunk of 64."""

    def forward(self, x_BTD: Tensor, state: DeltaState | None = None) -> tuple[Tensor, DeltaState | None]:
        hook = self.query.register_forward_hook(lambda module, inputs, query: LosesTheTail.apply(query, 64))
        mixed = super().forward(x_BTD, state)
        hook.remove()
        return mixed


class SeesOneAhead(SeparateProjections):
    """Training reads the input one position early; so does its definition."""

    def forward(self, x_BTD: Tensor, state: DeltaState | None = None) -> tuple[Tensor, DeltaState | None]:
        return super().forward(x_BTD if state is not None else _one_ahead(x_BTD), state)

    def reference(self, x_BTD: Tensor) -> Tensor:
        return super().reference(_one_ahead(x_BTD))


def _one_ahead(x_BTD: Tensor) -> Tensor:
    return torch.cat([x_BTD[:, 1:], x_BTD[:, -1:]], dim=1)


class SeesTheFutureWithoutGradient(SeparateProjections):
    """Divides by the largest number of the whole sequence, which gets no gradient."""

    def forward(self, x_BTD: Tensor, state: DeltaState | None = None) -> tuple[Tensor, DeltaState | None]:
        return super().forward(x_BTD / x_BTD.detach().abs().amax(dim=(1, 2), keepdim=True), state)

    def reference(self, x_BTD: Tensor) -> Tensor:
        return self.forward(x_BTD)[0]


class RoundsByTheFuture(SeparateProjections):
    """Adds the next input to what it mixes and takes it away again."""

    def forward(self, x_BTD: Tensor, state: DeltaState | None = None) -> tuple[Tensor, DeltaState | None]:
        mixed_BTD, state = super().forward(x_BTD, state)
        return mixed_BTD + _one_ahead(x_BTD) - _one_ahead(x_BTD), state


class ReturnsNoState(SeparateProjections):
    """Returns y where (y, state) is asked for; a batch of two would be unpacked as a pair."""

    def forward(self, x_BTD: Tensor, state: DeltaState | None = None) -> Any:
        return super().forward(x_BTD, state)[0]


class LosesAPosition(SeparateProjections):
    def forward(self, x_BTD: Tensor, state: DeltaState | None = None) -> tuple[Tensor, DeltaState | None]:
        mixed_BTD, state = super().forward(x_BTD, state)
        return mixed_BTD[:, 1:], state


class StepsWithoutState(SeparateProjections):
    def step(self, x_BD: Tensor, state: DeltaState) -> Any:
        return super().step(x_BD, state)[0]


class ForgetsAWeight(SeparateProjections):
    def __init__(self, *, dim: int, head_width: int, backend: str = "auto") -> None:
        super().__init__(dim=dim, head_width=head_width, backend=backend)
        self.scale = torch.nn.Parameter(torch.empty(dim))

    def forward(self, x_BTD: Tensor, state: DeltaState | None = None) -> tuple[Tensor, DeltaState | None]:
        mixed_BTD, state = super().forward(x_BTD, state)
        return self.scale * mixed_BTD, state

    def reference(self, x_BTD: Tensor) -> Tensor:
        return self.scale * super().reference(x_BTD)


class BeginsAtZero(ForgetsAWeight):
    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        torch.nn.init.zeros_(self.scale)


class SeesAheadBehindZero(BeginsAtZero):
    """The next input, behind it."""

    def forward(self, x_BTD: Tensor, state: DeltaState | None = None) -> tuple[Tensor, DeltaState | None]:
        return super().forward(_one_ahead(x_BTD), state)


class DropsAtRandom(SeparateProjections):
    def forward(self, x_BTD: Tensor, state: DeltaState | None = None) -> tuple[Tensor, DeltaState | None]:
        return super().forward(F.dropout(x_BTD, 0.5), state)


class TakesHalfPrecisionAlone(SeparateProjections):
    """Its kernel, as cuDNN's."""

    def forward(self, x_BTD: Tensor, state: DeltaState | None = None) -> tuple[Tensor, DeltaState | None]:
        if x_BTD.dtype == torch.float32 and not torch.is_autocast_enabled("cpu"):
            raise RuntimeError("no kernel for float32")
        return super().forward(x_BTD, state)


class HasNoStateYet(SeparateProjections):
    def init_state(self, batch_size: int, max_length: int, dtype: torch.dtype) -> DeltaState:
        raise NotImplementedError("no decoding yet")


class RaisesAtOddLengths(SeparateProjections):
    """Fails in a function of its own, below which torch fails."""

    def forward(self, x_BTD: Tensor, state: DeltaState | None = None) -> tuple[Tensor, DeltaState | None]:
        return super().forward(in_pairs(x_BTD), state)


def in_pairs(x_BTD: Tensor) -> Tensor:
    """The same tensor; of an odd length, an error."""
    return x_BTD.unflatten(1, (-1, 2)).flatten(1, 2)


class NormsOverTime(SeparateProjections):
    """Takes away the mean over the positions that it is given."""

    def forward(self, x_BTD: Tensor, state: DeltaState | None = None) -> tuple[Tensor, DeltaState | None]:
        return super().forward(x_BTD - x_BTD.mean(dim=1, keepdim=True), state)

    def reference(self, x_BTD: Tensor) -> Tensor:
        return self.forward(x_BTD)[0]


class NormsOverTheBatch(SeparateProjections):
    """Takes away the mean over the sequences of the batch."""

    def forward(self, x_BTD: Tensor, state: DeltaState | None = None) -> tuple[Tensor, DeltaState | None]:
        return super().forward(x_BTD - x_BTD.mean(dim=0), state)


class StepsDecayTwice(SeparateProjections):
    """In a step the memory decays before it is read and again as it is."""

    def step(self, x_BD: Tensor, state: DeltaState) -> tuple[Tensor, DeltaState]:
        state.memory_BHKV.mul_(self.decay)
        return super().step(x_BD, state)


class OnePercentOff(SeparateProjections):
    def forward(self, x_BTD: Tensor, state: DeltaState | None = None) -> tuple[Tensor, DeltaState | None]:
        mixed_BTD, state = super().forward(x_BTD, state)
        return 1.01 * mixed_BTD, state


class DecaysOfNoPosition(SeparateProjections):
    def log_decay(self, x_BTD: Tensor) -> Tensor:
        return torch.full((self.num_heads,), self.decay).log()


class GrowsByItsDecay(SeparateProjections):
    def log_decay(self, x_BTD: Tensor) -> Tensor:
        return torch.full((*x_BTD.shape[:2], self.num_heads), 1 / self.decay).log()


class TakesNoBackend(SeparateProjections):
    """A mixer whose constructor has only what it needs itself."""

    def __init__(self, *, dim: int) -> None:
        super().__init__(dim=dim, head_width=dim)


class FailsToBuild(SeparateProjections):
    def __init__(self, *, dim: int, head_width: int, backend: str = "auto") -> None:
        super().__init__(dim=dim, head_width=head_width, backend=backend)
        self.share = dim / 0


class StatesNoFlops(Mixer):
    forward, reference, init_state = (
        SeparateProjections.forward,
        SeparateProjections.reference,
        SeparateProjections.init_state,
    )


class OverflowsWhereItForgets(SeparateProjections):
    """Decays by its input, and masks the decays of later positions when they are exponentials already."""

    def log_decay(self, x_BTD: Tensor) -> Tensor:
        return -0.02 * x_BTD[..., : self.num_heads].relu().square()

    def _decay(self, x_BTD: Tensor, t: int) -> Tensor:
        return self.log_decay(x_BTD)[:, t, :, None, None].exp()

    def forward(self, x_BTD: Tensor, state: DeltaState | None = None) -> tuple[Tensor, DeltaState | None]:
        if state is not None:
            return super().forward(x_BTD, state)
        query, key, value = (part.transpose(1, 2) for part in self._heads(x_BTD))
        total_BHT = self.log_decay(x_BTD).cumsum(1).transpose(1, 2)
        decay_BHTS = (total_BHT[..., :, None] - total_BHT[..., None, :]).exp().tril()
        mixed_BHTK = (query @ key.mT * decay_BHTS) @ value
        return self.output(self.norm(mixed_BHTK.transpose(1, 2)).flatten(2)), None


class CheapOnPaper(SeparateProjections):
    """States 7 operations a position."""

    def mixing_flops(self, length: int) -> int:
        return 7 * length


class PairsOnPaper(SeparateProjections):
    """States all pairs of positions as if it were attention."""

    def mixing_flops(self, length: int) -> int:
        return super().mixing_flops(length) * (length + 1) // 2


class TrainsLess(SeparateProjections):
    """Its key gets no gradient."""

    def forward(self, x_BTD: Tensor, state: DeltaState | None = None) -> tuple[Tensor, DeltaState | None]:
        with torch.no_grad():
            hidden = F.linear(x_BTD, self.key.weight)
        hook = self.key.register_forward_hook(lambda module, inputs, key: hidden)
        mixed = super().forward(x_BTD, state)
        hook.remove()
        return mixed


class HandsOnAnother(SeparateProjections):
    def forward(self, x_BTD: Tensor, state: DeltaState | None = None) -> tuple[Tensor, DeltaState | None]:
        mixed_BTD, state = super().forward(x_BTD, state)
        return mixed_BTD, state if state is None else DeltaState(state.memory_BHKV.clone())


class KeepsTensors(SeparateProjections):
    """Constants where checkpoints do not have them: a buffer, and an attribute of a submodule."""

    def __init__(self, *, dim: int, head_width: int, backend: str = "auto") -> None:
        super().__init__(dim=dim, head_width=head_width, backend=backend)
        self.register_buffer("decays", torch.ones(self.num_heads))
        self.norm.scale = torch.ones(1)
