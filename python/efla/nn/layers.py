"""The small layers: RMS norm, short convolution, SwiGLU MLP. Parameters carry fla's names."""

import math

import torch
from torch import Tensor, nn

from ..operators import rms_norm, short_conv, swiglu
from .cache import replaced


def _weight_for(x: Tensor, weight: Tensor) -> Tensor:
    """The weight in a type that the operators take beside x: float32 or x's own."""
    return weight if weight.dtype in (x.dtype, torch.float32) else weight.to(x.dtype)


class RMSNorm(nn.Module):
    """``x * rsqrt(mean(x * x, -1) + eps) * weight [* silu(gate)]``; weight ``[dim]``."""

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """x ``[..., dim]`` and gate of the same shape; the result has x's dtype."""
        if gate is not None:
            gate = gate.to(x.dtype)
        return rms_norm(x, _weight_for(x, self.weight), self.eps, gate)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over time with an optional SiLU; weight ``[channels, 1, width]``."""

    def __init__(
        self,
        channels: int,
        width: int,
        silu: bool = True,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.silu = silu
        self.weight = nn.Parameter(torch.empty(channels, 1, width, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(channels, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform, as torch initialises a depthwise Conv1d."""
        bound = 1 / math.sqrt(self.weight.shape[-1])
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(
        self, x: Tensor, tail: Tensor | None, cu_seqlens: Tensor | None, keep_tail: bool
    ) -> tuple[Tensor, Tensor | None]:
        """x ``[B, T, channels]``; tail ``[B, channels, width]``: the inputs before x. Returns y and,
        if asked for, the tail after x."""
        if tail is not None and tail.dtype != x.dtype:
            tail = tail.to(x.dtype)
        y, new_tail = short_conv(
            x,
            _weight_for(x, self.weight).squeeze(1),
            silu=self.silu,
            initial_state=tail,
            output_final_state=keep_tail,
            cu_seqlens=cu_seqlens,
            bias=None if self.bias is None else _weight_for(x, self.bias),
        )
        return y, None if new_tail is None else replaced(tail, new_tail)

    def extra_repr(self) -> str:
        channels, _, width = self.weight.shape
        return f"{channels}, width={width}, silu={self.silu}, bias={self.bias is not None}"


class SwiGLU(nn.Module):
    """``down_proj(silu(gate_proj(x)) * up_proj(x))``."""

    def __init__(
        self,
        dim: int,
        inner: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype)

        self.gate_proj = linear(dim, inner)
        self.up_proj = linear(dim, inner)
        self.down_proj = linear(inner, dim)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
        return y
