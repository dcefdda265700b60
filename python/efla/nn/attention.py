"""Softmax attention with rotary positions: the layers that fla's `attn` field puts into a hybrid."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cache import Cache, LayerState
from .padding import PaddedRows

_FIELDS = {"layers", "num_heads", "num_kv_heads", "window_size", "rope_theta", "qkv_bias"}


def _rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x ``[B, T, H, D]`` turned by its positions ``[B, T]``; halves, not neighbours, are pairs."""
    half = x.shape[-1] // 2
    exponents = torch.arange(half, device=x.device, dtype=torch.float64)
    frequencies = (exponents * (-math.log(theta) / half)).exp()
    # Reduced while they are exact, so that far positions are as good as near ones.
    angles = (positions.double().unsqueeze(-1) * frequencies) % (2 * math.pi)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    angles = angles.to(wide).unsqueeze(2)
    a, b = x.to(wide).chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class SoftmaxAttention(nn.Module):
    """Causal softmax attention; names and fields of ``fla.layers.Attention``.

    Args:
        num_kv_heads: heads of keys and values, a divisor of num_heads (its default).
        window_size: a token sees itself and window_size - 1 tokens before it; None: all of them.
        layer_idx: the layer's place in a :class:`efla.nn.Cache`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        qkv_bias: bool = False,
        window_size: int | None = None,
        rope_theta: float = 10000.0,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or hidden_size % num_heads or (hidden_size // num_heads) % 2:
            raise ValueError(
                f"num_heads must be a divisor of hidden_size = {hidden_size} that leaves heads of "
                f"even size, not {num_heads}"
            )
        if kv_heads < 1 or num_heads % kv_heads:
            raise ValueError(
                f"num_kv_heads must be a divisor of num_heads = {num_heads}, not {kv_heads}"
            )
        if window_size is not None and window_size < 1:
            raise ValueError(f"window_size must be at least 1, not {window_size}")
        self.head_dim = hidden_size // num_heads
        self.num_heads, self.num_kv_heads = num_heads, kv_heads
        self.window_size, self.rope_theta, self.layer_idx = window_size, rope_theta, layer_idx
        kv_dim = kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.k_proj = nn.Linear(hidden_size, kv_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(hidden_size, kv_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    @classmethod
    def from_fields(
        cls, hidden_size: int, fields: dict[str, Any], layer_idx: int
    ) -> "SoftmaxAttention":
        """Of the `attn` field of a config.json."""
        for key in ("layers", "num_heads"):
            if key not in fields:
                raise ValueError(f"config: attn must have the key {key!r}")
        for key in fields:
            if key not in _FIELDS:
                raise ValueError(
                    f"config: attn has the unknown key {key!r}; it has {', '.join(sorted(_FIELDS))}"
                )
        given = {key: value for key, value in fields.items() if key != "layers"}
        return cls(hidden_size, layer_idx=layer_idx, **given)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = False,
        *,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, None, Cache | None]:
        """As :meth:`efla.nn.EFLA.forward`."""
        batch, length = hidden_states.shape[:2]
        rows = None
        if attention_mask is not None and cu_seqlens is None:
            rows = PaddedRows(attention_mask, batch, length)
            hidden_states, cu_seqlens = rows.pack(hidden_states), rows.cu_seqlens
        if past_key_values is None and use_cache:
            past_key_values = Cache()
        state = None
        if past_key_values is not None:
            if self.layer_idx is None:
                raise ValueError("a layer with a cache needs its layer_idx (of the constructor)")
            state = past_key_values.layer(self.layer_idx)
        o = self._mix(hidden_states, state, use_cache is not False, cu_seqlens)
        if state is not None and use_cache is not False:
            state.tokens += length
        o = self.o_proj(o.flatten(-2))
        return o if rows is None else rows.unpack(o), None, past_key_values

    def _mix(
        self, x: Tensor, state: LayerState | None, advance: bool, cu_seqlens: Tensor | None
    ) -> Tensor:
        """``[B, T, hidden]`` -> ``[B, T, H, D]``."""

        def heads(y: Tensor, number: int) -> Tensor:
            return y.view(*y.shape[:-1], number, self.head_dim)

        q = heads(self.q_proj(x), self.num_heads)
        k, v = (heads(proj(x), self.num_kv_heads) for proj in (self.k_proj, self.v_proj))
        if cu_seqlens is None:
            return self._attend(q, k, v, None, state, advance)
        # Packed sequences as padded rows of their own: their tokens stand on the left.
        lengths = cu_seqlens.diff()
        longest = int(lengths.max()) if lengths.numel() else 0
        valid = torch.arange(longest, device=x.device) < lengths.to(x.device).unsqueeze(-1)
        first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])

        def padded(packed: Tensor) -> Tensor:
            rows = packed.new_zeros(*valid.shape, *packed.shape[2:])
            return rows.masked_scatter(valid[..., None, None], packed[0, first:last])

        o = self._attend(padded(q), padded(k), padded(v), valid, state, advance)
        packed = torch.zeros_like(q)
        return torch.cat([packed[:, :first], o[valid].unsqueeze(0), packed[:, last:]], 1)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        valid: Tensor | None,
        state: LayerState | None,
        advance: bool,
    ) -> Tensor:
        """One row a sequence. valid ``[B, T]``: which of the tokens are there; None: all."""
        batch, length = q.shape[:2]
        positions = torch.arange(length, device=q.device).expand(batch, length)
        if state is not None and state.lengths is not None:
            positions = positions + state.lengths.unsqueeze(-1)
        q, k = (_rotate(t, positions, self.rope_theta) for t in (q, k))
        q, k = q.to(v.dtype), k.to(v.dtype)
        if valid is not None:
            positions = positions.where(valid, -1)  # -1: nobody sees it
        key_positions = positions
        if state is not None and state.keys is not None:
            assert state.values is not None and state.positions is not None
            k = torch.cat([state.keys.to(k.dtype), k], 1)
            v = torch.cat([state.values.to(v.dtype), v], 1)
            key_positions = torch.cat([state.positions, positions], 1)
        if state is not None and advance:
            self._keep(state, k, v, key_positions, length if valid is None else valid.sum(1))
        plain = valid is None and key_positions is positions
        if plain and (self.window_size is None or self.window_size >= length):
            return self._softmax(q, k, v, None)
        query = positions.unsqueeze(-1)
        key = key_positions.unsqueeze(1)
        mask = (key >= 0) & (key <= query)
        if self.window_size is not None:
            mask = mask & (key > query - self.window_size)
        # A query that is not there sees everything: a row of nothing is NaN in some kernels.
        return self._softmax(q, k, v, (mask | (query < 0)).unsqueeze(1))

    def _softmax(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        o = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )
        return o.transpose(1, 2)

    def _keep(
        self, state: LayerState, k: Tensor, v: Tensor, positions: Tensor, new: int | Tensor
    ) -> None:
        k, v = k.detach(), v.detach()
        if self.window_size is not None and k.shape[1] > self.window_size - 1:
            kept = positions.argsort(1)[:, k.shape[1] - self.window_size + 1 :]
            positions = positions.gather(1, kept)
            index = kept[..., None, None].expand(-1, -1, *k.shape[2:])
            k, v = k.gather(1, index), v.gather(1, index)
        if state.lengths is None:
            state.lengths = positions.new_zeros(positions.shape[0])
        state.keys, state.values, state.positions = k, v, positions
        state.lengths = state.lengths + new
