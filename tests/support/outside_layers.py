"""Plain layers of a user, and such that are no mixers, for attn=module."""

import torch
from torch import Tensor, nn


class Tutorial(nn.Module):
    """Causal attention as a tutorial has it: its mask in a buffer, a parameter that the constructor fills."""

    def __init__(self, dim: int, num_heads: int = 2, max_length: int = 512, scale: float = 1.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.gain = nn.Parameter(scale * torch.ones(dim))
        self.mask: Tensor
        self.register_buffer("mask", torch.tril(torch.ones(max_length, max_length)))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        score = (query @ key.mT / key.shape[-1] ** 0.5).masked_fill(self.mask[:length, :length] == 0, -torch.inf)
        return (score.softmax(-1) @ value).transpose(1, 2).flatten(2) * self.gain


class SeesAhead(Tutorial):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.mean(dim=1, keepdim=True)


class Narrows(Tutorial):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[..., :-1]


class ReturnsTwo(Tutorial):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x), None


class Untrained(Tutorial):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


class NotFinite(Tutorial):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 0.0


class Raises(Tutorial):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("not today")


class Drops(Tutorial):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.5, self.training))


class BeginsAtZero(Tutorial):
    """Its gain begins at 0, and what it hides sees ahead."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, scale=0.0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.roll(-1, dims=1))


class RandomFeatures(nn.Module):
    """Features that are drawn once, in a buffer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.out = nn.Linear(dim, dim)
        self.register_buffer("omega", torch.randn(dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.out((x @ self.omega).cos())


class OtherWidth(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.out = nn.Linear(size, size)


class NamedWidth(nn.Module):
    def __init__(self, d_model: int, hidden_size: int, embed_dim: int) -> None:
        super().__init__()
        self.out = nn.Linear(d_model, hidden_size + embed_dim - d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)


class Weightless(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class LongConvolution(nn.Module):
    """Causal convolution as long as the sequence, by Fourier transforms of twice its length."""

    def __init__(self, dim: int, max_length: int = 2048) -> None:
        super().__init__()
        decay = torch.exp(-torch.arange(max_length)[:, None] / torch.logspace(0.5, 2.5, dim))
        self.filter = nn.Parameter(torch.randn(max_length, dim) * decay / dim**0.5)
        self.output = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        spectrum = torch.fft.rfft(x.float(), n=2 * length, dim=1)
        filtered = spectrum * torch.fft.rfft(self.filter[:length], n=2 * length, dim=0)
        return self.output(torch.fft.irfft(filtered, n=2 * length, dim=1)[:, :length].to(x.dtype))


class CircularConvolution(LongConvolution):
    """The same without padding, so that the end of the sequence comes round to its beginning."""

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x.float(), dim=1) * torch.fft.rfft(self.filter[: x.shape[1]], dim=0)
        return self.output(torch.fft.irfft(spectrum, n=x.shape[1], dim=1).to(x.dtype))


class Unlisted(LongConvolution):
    """It runs an operator that no formula counts."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(outside_identity(x))


@torch.library.custom_op("outside::identity", mutates_args=())
def outside_identity(x: Tensor) -> Tensor:
    return x.clone()


outside_identity.register_autograd(lambda _, gradient: gradient)


class BatchNormed(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(dim), nn.Linear(dim, dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.out(self.norm(x_BTD.transpose(1, 2)).transpose(1, 2))
