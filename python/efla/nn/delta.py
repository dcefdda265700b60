"""The delta-rule layers (docs/mathematics.md, "The layer").

One implementation; DeltaNet, EFLA and their gated forms differ in its settings alone.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..operators import RULES, Rule, chunk, recurrent, rms_norm, step_, swiglu
from .cache import Cache, LayerState, replaced
from .layers import RMSNorm, ShortConvolution
from .padding import pack_rows

Norm = Literal["none", "l2", "sum"]
Activation = Literal["silu", "relu", "elu", "identity"]
BetaActivation = Literal["sigmoid", "softplus", "adaptive"]
Mode = Literal["chunk", "fused_recurrent"]

_L2_EPS = 1e-6  # inside the root, as the operators and fla have it
_GATED_RULES = ("linear", "euler", "exact", "exact_log")


def _require(ok: bool, name: str, expected: str, found: object) -> None:
    if not ok:
        raise ValueError(f"{name} must be {expected}, not {found!r}")


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    _require(value in choices, name, "one of " + ", ".join(choices), value)


def _whole(name: str, value: float) -> int:
    _require(value >= 1 and math.isclose(value, round(value)), name, "a whole number >= 1", value)
    return round(value)


def _activate(x: Tensor, activation: Activation) -> Tensor:
    if activation == "silu":
        return F.silu(x)
    if activation == "relu":
        return F.relu(x)
    return F.elu(x) + 1 if activation == "elu" else x


def _normalize(x: Tensor, norm: Norm) -> Tensor:
    if norm == "l2":
        size = x.shape[-1]
        return rms_norm(x, None, _L2_EPS / size) * (1 / math.sqrt(size))
    if norm == "sum":
        return (x / x.sum(-1, keepdim=True)).to(x.dtype)
    return x


def _heads(x: Tensor, heads: int, size: int) -> Tensor:
    """``[B, T, heads * size]`` -> ``[B, T, heads, size]``."""
    return x.view(*x.shape[:-1], heads, size)


class DeltaLayer(nn.Module):
    """Projections, short convolutions, the recurrence, per-head norm, output gate."""

    def __init__(
        self,
        *,
        mode: Mode,
        hidden_size: int,
        num_heads: int,
        num_v_heads: int,
        head_k_dim: int,
        head_v_dim: int,
        gated: bool,
        use_beta: bool,
        use_gate: bool,
        use_output_norm: bool,
        use_short_conv: bool,
        conv_size: int,
        conv_bias: bool,
        allow_neg_eigval: bool,
        qk_activation: Activation,
        qk_norm: Norm,
        q_norm: Norm | None,
        beta_activation: BetaActivation,
        rule: Rule,
        norm_eps: float,
        layer_idx: int | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        _one_of("mode", mode, ("chunk", "fused_recurrent"))
        _one_of("rule", rule, _GATED_RULES if gated else RULES[:-1])
        _one_of("qk_activation", qk_activation, ("silu", "relu", "elu", "identity"))
        _one_of("beta_activation", beta_activation, ("sigmoid", "softplus", "adaptive"))
        q_norm = qk_norm if q_norm is None else q_norm
        for name, norm in (("qk_norm", qk_norm), ("q_norm", q_norm)):
            _one_of(name, norm, ("none", "l2", "sum"))
        _require(
            not allow_neg_eigval or (rule == "euler" and beta_activation == "sigmoid"),
            "allow_neg_eigval",
            "False unless rule is euler and beta_activation is sigmoid (the exact flow has no "
            "negative eigenvalues)",
            allow_neg_eigval,
        )
        _require(
            use_beta or beta_activation == "sigmoid",
            "beta_activation",
            "left at sigmoid when use_beta is False",
            beta_activation,
        )
        self.mode, self.rule, self.layer_idx = mode, rule, layer_idx
        self.hidden_size, self.num_heads, self.num_v_heads = hidden_size, num_heads, num_v_heads
        self.head_k_dim, self.head_v_dim = head_k_dim, head_v_dim
        self.key_dim, self.value_dim = num_heads * head_k_dim, num_v_heads * head_v_dim
        self.use_beta, self.use_gate, self.use_short_conv = use_beta, use_gate, use_short_conv
        self.use_output_norm, self.allow_neg_eigval = use_output_norm, allow_neg_eigval
        self.qk_activation, self.qk_norm, self.q_norm = qk_activation, qk_norm, q_norm
        self.beta_activation = beta_activation
        self.norm_in_operator = qk_norm == "l2" and q_norm == "l2"

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype)

        def conv(channels: int, silu: bool) -> ShortConvolution:
            return ShortConvolution(channels, conv_size, silu, conv_bias, device, dtype)

        self.q_proj = linear(hidden_size, self.key_dim)
        self.k_proj = linear(hidden_size, self.key_dim)
        self.v_proj = linear(hidden_size, self.value_dim)
        if gated:
            self.a_proj = linear(hidden_size, num_v_heads)
            # Few numbers that need their digits: float32 in a 16-bit model too.
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            self.A_log = nn.Parameter(torch.empty(num_v_heads, device=device, dtype=wide))
            self.dt_bias = nn.Parameter(torch.empty(num_v_heads, device=device, dtype=wide))
        self.gated = gated
        if use_beta:
            self.b_proj = linear(hidden_size, num_v_heads)
        if beta_activation == "adaptive":
            self.adaptive_decay = nn.Parameter(torch.empty(num_v_heads, device=device, dtype=dtype))
        if use_short_conv:
            self.q_conv1d = conv(self.key_dim, qk_activation == "silu")
            self.k_conv1d = conv(self.key_dim, qk_activation == "silu")
            self.v_conv1d = conv(self.value_dim, True)
        if use_gate:
            self.g_proj = linear(hidden_size, self.value_dim)
        if use_output_norm:
            self.o_norm = RMSNorm(head_v_dim, norm_eps, device, dtype)
        self.o_proj = linear(self.value_dim, hidden_size)
        self.reset_parameters()

    @torch.no_grad()
    def initial_values(self) -> list[tuple[nn.Parameter, Tensor]]:
        """The layer's own parameters (its modules have theirs) with fresh first values: A ~ U(0, 16),
        dt log-uniform in [0.001, 0.1], the adaptive factor 1."""
        values = []
        if self.gated:
            a = torch.empty_like(self.A_log).uniform_(0, 16).clamp_(min=1e-4)
            dt = torch.empty_like(self.dt_bias).uniform_(math.log(0.001), math.log(0.1))
            dt = dt.exp_().clamp_(min=1e-4)
            values.append((self.A_log, a.log_()))
            values.append((self.dt_bias, dt + torch.log(-torch.expm1(-dt))))  # softplus inverted
        if self.beta_activation == "adaptive":
            one = math.log(math.expm1(1.0))
            values.append((self.adaptive_decay, torch.full_like(self.adaptive_decay, one)))
        return values

    def reset_parameters(self) -> None:
        """Draws :meth:`initial_values`; A_log and dt_bias are marked to be left out of weight decay,
        as in fla."""
        for parameter, value in self.initial_values():
            with torch.no_grad():
                parameter.copy_(value)
        if self.gated:
            self.A_log._no_weight_decay = True  # type: ignore[attr-defined]
            self.dt_bias._no_weight_decay = True  # type: ignore[attr-defined]

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
        """hidden_states ``[B, T, hidden_size]`` -> (the same shape, None, the cache).

        Args:
            attention_mask: ``[B, T]`` (or with the columns of earlier tokens too), 0 at padding. The
                result for a row is that of its valid tokens alone, and zero at the padding. Looks
                at the values; for torch.compile(fullgraph=True) and CUDA graphs pass cu_seqlens.
            past_key_values: where the sequences stand; they go on from there and the cache is
                advanced. The layer needs its layer_idx.
            use_cache: True makes a cache if none is passed, False leaves the one passed as it was.
            output_attentions: fla's argument; there are no attentions to return.
            cu_seqlens: ``[N + 1]``, offsets of N sequences packed into a batch of one.
        """
        length = hidden_states.shape[1]
        hidden_states, cu_seqlens, rows = pack_rows(hidden_states, attention_mask, cu_seqlens)
        if past_key_values is None and use_cache:
            past_key_values = Cache()
        state, advance = None, False
        if past_key_values is not None:
            if self.layer_idx is None:
                raise ValueError("a layer with a cache needs its layer_idx (of the constructor)")
            state = past_key_values.layer(self.layer_idx)
            advance = use_cache is not False
        y = self._mix(hidden_states, state, advance, cu_seqlens)
        if state is not None and advance:
            state.tokens += length
        return y if rows is None else rows.unpack(y), None, past_key_values

    def _mix(
        self, x: Tensor, state: LayerState | None, advance: bool, cu_seqlens: Tensor | None
    ) -> Tensor:
        past = LayerState() if state is None else state
        kept = past if advance else LayerState()  # what is not to be kept goes nowhere
        q, kept.conv_q = self._stream("q", x, past.conv_q, cu_seqlens, advance, self.qk_activation)
        k, kept.conv_k = self._stream("k", x, past.conv_k, cu_seqlens, advance, self.qk_activation)
        v, kept.conv_v = self._stream("v", x, past.conv_v, cu_seqlens, advance, "silu")
        q = _heads(q, self.num_heads, self.head_k_dim)
        k = _heads(k, self.num_heads, self.head_k_dim)
        v = _heads(v, self.num_v_heads, self.head_v_dim)
        if not self.norm_in_operator:
            q, k = _normalize(q, self.q_norm), _normalize(k, self.qk_norm)
        o, kept.recurrent_state = self._recurrence(
            q.to(v.dtype), k.to(v.dtype), v, x, past.recurrent_state, cu_seqlens, advance
        )
        return self._output(o, x)

    def _stream(
        self,
        name: Literal["q", "k", "v"],
        x: Tensor,
        tail: Tensor | None,
        cu_seqlens: Tensor | None,
        advance: bool,
        activation: Activation,
    ) -> tuple[Tensor, Tensor | None]:
        """Projection, convolution, activation: ``[B, T, heads * size]``, and the next tail."""
        y: Tensor = getattr(self, f"{name}_proj")(x)
        if not self.use_short_conv:
            return _activate(y, activation), None
        conv: ShortConvolution = getattr(self, f"{name}_conv1d")
        y, tail = conv(y, tail, cu_seqlens, advance)
        return y if conv.silu else _activate(y, activation), tail

    def _beta(self, x: Tensor, v: Tensor) -> Tensor:
        """``[B, T, HV]``, float32 (float64 in a float64 model)."""
        wide = torch.float64 if v.dtype == torch.float64 else torch.float32
        if not self.use_beta:
            return v.new_full(v.shape[:3], 2.0 if self.allow_neg_eigval else 1.0, dtype=wide)
        z = self.b_proj(x).to(wide)
        beta = F.softplus(z) if self.beta_activation == "softplus" else z.sigmoid()
        if self.beta_activation == "adaptive":
            beta = beta * F.softplus(self.adaptive_decay.to(wide))
        return 2 * beta if self.allow_neg_eigval else beta

    def _log_decay(self, x: Tensor, v: Tensor) -> Tensor | None:
        """``-exp(A_log) * softplus(a_proj(x) + dt_bias)``, ``[B, T, HV]``."""
        if not self.gated:
            return None
        wide = torch.float64 if v.dtype == torch.float64 else torch.float32
        dt = F.softplus(self.a_proj(x).to(wide) + self.dt_bias.to(wide))
        return -(self.A_log.to(wide).exp() * dt)

    def _recurrence(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        x: Tensor,
        state: Tensor | None,
        cu_seqlens: Tensor | None,
        advance: bool,
    ) -> tuple[Tensor, Tensor | None]:
        beta, log_decay = self._beta(x, v), self._log_decay(x, v)
        if advance and q.shape[1] == 1 and cu_seqlens is None and not torch.is_grad_enabled():
            if state is None:
                shape = (q.shape[0], self.num_v_heads, self.head_k_dim, self.head_v_dim)
                state = beta.new_zeros(shape)
            o = step_(
                q,
                k,
                v,
                beta,
                state,
                log_decay,
                rule=self.rule,
                qk_l2norm=self.norm_in_operator,
            )
            return o, state
        operator = recurrent if self.mode == "fused_recurrent" else chunk
        o, final = operator(
            q,
            k,
            v,
            beta,
            log_decay,
            rule=self.rule,
            initial_state=state,
            output_final_state=advance,
            cu_seqlens=cu_seqlens,
            qk_l2norm=self.norm_in_operator,
        )
        return o, None if final is None else replaced(state, final)

    def _output(self, o: Tensor, x: Tensor) -> Tensor:
        gate = None
        if self.use_gate:
            gate = _heads(self.g_proj(x), self.num_v_heads, self.head_v_dim).to(o.dtype)
        if self.use_output_norm:
            o = self.o_norm(o, gate)
        elif gate is not None:
            o = swiglu(gate, o)
        y: Tensor = self.o_proj(o.flatten(-2))
        return y

    def extra_repr(self) -> str:
        return (
            f"rule={self.rule}, heads={self.num_heads}/{self.num_v_heads} of "
            f"{self.head_k_dim}x{self.head_v_dim}, qk_norm={self.qk_norm}"
        )


class EFLA(DeltaLayer):
    """Exact-flow linear attention in the place of fla's DeltaNet layer.

    The fields of ``fla.layers.DeltaNet`` with its parameter names, and with them ``rule``,
    ``beta_activation``, ``q_norm`` and ``use_output_norm``. The defaults make EFLA: rule exact on raw
    keys; ``rule="euler", qk_norm="l2"`` makes DeltaNet.

    Args:
        mode: "chunk", or "fused_recurrent" to go token by token.
        d_model: another name of hidden_size.
        expand_k, expand_v: heads are ``hidden_size * expand / num_heads`` wide.
        use_beta: False: beta = 1.
        use_gate: multiply by ``silu(g_proj(x))`` before the output projection.
        use_short_conv, conv_size, conv_bias: the causal convolutions of q, k and v.
        allow_neg_eigval: beta in (0, 2); rule euler only.
        layer_idx: the layer's place in a :class:`Cache`.
        qk_activation: of q and k (v always takes SiLU).
        qk_norm, q_norm: "none", "l2" or "sum"; q_norm, of queries alone, is qk_norm by default.
        rule: "linear", "euler", "rk2", "rk4" or "exact".
        beta_activation: "sigmoid", "softplus" (unbounded) or "adaptive" (a learned factor).
    """

    def __init__(
        self,
        mode: Mode = "chunk",
        d_model: int | None = None,
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        num_heads: int = 4,
        use_beta: bool = True,
        use_gate: bool = False,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        allow_neg_eigval: bool = False,
        layer_idx: int | None = None,
        qk_activation: Activation = "silu",
        qk_norm: Norm = "none",
        norm_eps: float = 1e-5,
        *,
        rule: Rule = "exact",
        beta_activation: BetaActivation = "sigmoid",
        q_norm: Norm | None = None,
        use_output_norm: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        hidden_size = hidden_size if d_model is None else d_model
        _require(num_heads >= 1, "num_heads", "at least 1", num_heads)
        key_dim = _whole("hidden_size * expand_k", hidden_size * expand_k)
        value_dim = _whole("hidden_size * expand_v", hidden_size * expand_v)
        for name, size in (("expand_k", key_dim), ("expand_v", value_dim)):
            _require(
                size % num_heads == 0,
                "num_heads",
                f"a divisor of hidden_size * {name} = {size}",
                num_heads,
            )
        super().__init__(
            mode=mode,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_v_heads=num_heads,
            head_k_dim=key_dim // num_heads,
            head_v_dim=value_dim // num_heads,
            gated=False,
            use_beta=use_beta,
            use_gate=use_gate,
            use_output_norm=use_output_norm,
            use_short_conv=use_short_conv,
            conv_size=conv_size,
            conv_bias=conv_bias,
            allow_neg_eigval=allow_neg_eigval,
            qk_activation=qk_activation,
            qk_norm=qk_norm,
            q_norm=q_norm,
            beta_activation=beta_activation,
            rule=rule,
            norm_eps=norm_eps,
            layer_idx=layer_idx,
            device=device,
            dtype=dtype,
        )


class GatedEFLA(DeltaLayer):
    """EFLA with a decay of the state, in the place of fla's GatedDeltaNet layer.

    The fields of ``fla.layers.GatedDeltaNet`` with its parameter names, and with them those that
    :class:`EFLA` adds. ``rule``: "exact" (a is a rate, appendix D of arXiv 2512.12602), "exact_log"
    (log a is the decay itself), "euler" with ``qk_norm="l2"``: Gated DeltaNet.

    Args:
        head_dim: width of the heads of q and k; those of v are ``head_dim * expand_v`` wide.
        num_v_heads: value heads, a multiple of num_heads (its default).
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2.0,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        mode: Mode = "chunk",
        use_gate: bool = True,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        *,
        rule: Rule = "exact",
        qk_norm: Norm = "none",
        q_norm: Norm | None = None,
        qk_activation: Activation = "silu",
        use_beta: bool = True,
        beta_activation: BetaActivation = "sigmoid",
        use_output_norm: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _require(num_heads >= 1, "num_heads", "at least 1", num_heads)
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        _require(
            num_v_heads >= 1 and num_v_heads % num_heads == 0,
            "num_v_heads",
            f"a multiple of num_heads = {num_heads}",
            num_v_heads,
        )
        super().__init__(
            mode=mode,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_v_heads=num_v_heads,
            head_k_dim=head_dim,
            head_v_dim=_whole("head_dim * expand_v", head_dim * expand_v),
            gated=True,
            use_beta=use_beta,
            use_gate=use_gate,
            use_output_norm=use_output_norm,
            use_short_conv=use_short_conv,
            conv_size=conv_size,
            conv_bias=conv_bias,
            allow_neg_eigval=allow_neg_eigval,
            qk_activation=qk_activation,
            qk_norm=qk_norm,
            q_norm=q_norm,
            beta_activation=beta_activation,
            rule=rule,
            norm_eps=norm_eps,
            layer_idx=layer_idx,
            device=device,
            dtype=dtype,
        )
