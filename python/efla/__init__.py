"""EFLA, exact-flow linear attention: the operators of libefla_ops.so as Python functions.

Shapes: q, k ``[B, T, H, K]``; v, o ``[B, T, HV, V]``; beta, log_decay ``[B, T, HV]``; states
``[N, HV, K, V]`` float32 (float64 for float64 inputs). K and V are at most 512. HV is a multiple of
H, and value head i reads key head ``i // (HV // H)``. q, k, v are float32, float64, bfloat16 or
float16 (on the CPU float16 runs through float32 copies: no faster than float32). Any strides are
accepted. Values are not looked at: the exact rules need beta >= 0, and log_decay must be <= 0; what
comes out otherwise may overflow. Gradients are first derivatives in reverse mode only. Bad arguments raise RuntimeError naming
the argument and its shape. The same operators are registered as ``torch.ops.efla.NAME``, where an
output that was not asked for is a tensor of shape ``[0]`` instead of None.

Rules: "linear" (Mamba-2, linear attention), "euler" (DeltaNet, with log_decay Gated DeltaNet), "rk2",
"rk4" (no log_decay), "exact" (EFLA, with log_decay its gated form), "exact_log" (gated EFLA with the
decay read as a logarithm).
"""

from typing import Literal, Optional, Tuple

import torch
from torch import Tensor

from ._library import load_library

library_path = load_library()

# Overloads resolved once: a step is a few microseconds, and looking the name up costs as much.
_chunk = torch.ops.efla.chunk.default
_recurrent = torch.ops.efla.recurrent.default
_step = torch.ops.efla.step_.default
_short_conv = torch.ops.efla.short_conv.default
_rms_norm = torch.ops.efla.rms_norm.default
_swiglu = torch.ops.efla.swiglu.default
_check_errors = torch.ops.efla.check_errors.default
_set_debug = torch.ops.efla.set_debug.default

Rule = Literal["linear", "euler", "rk2", "rk4", "exact", "exact_log"]
RULES: Tuple[str, ...] = ("linear", "euler", "rk2", "rk4", "exact", "exact_log")

__all__ = [
    "RULES",
    "check_errors",
    "chunk",
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "library_path",
    "recurrent",
    "rms_norm",
    "set_debug",
    "short_conv",
    "step_",
    "swiglu",
]


def chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Optional[Tensor] = None,
    *,
    rule: Rule = "exact",
    scale: Optional[float] = None,
    initial_state: Optional[Tensor] = None,
    output_final_state: bool = False,
    cu_seqlens: Optional[Tensor] = None,
    qk_l2norm: bool = False,
) -> Tuple[Tensor, Optional[Tensor]]:
    """The delta-rule family over whole sequences, chunkwise parallel; differentiable once.

    Args:
        q, k: queries and keys ``[B, T, H, K]``.
        v: values ``[B, T, HV, V]``.
        beta: step sizes ``[B, T, HV]``, float32 or q's dtype; at least 0 for the exact rules.
        log_decay: logarithm of the state's decay ``[B, T, HV]``, at most 0; None: no decay.
        rule: the step rule, see the module's docstring.
        scale: multiplies q; ``K ** -0.5`` by default.
        initial_state: ``[N, HV, K, V]``; zero by default.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: offsets ``[N + 1]`` (int32 or int64) of sequences packed along T; then B = 1.
            Rows outside ``[cu_seqlens[0], cu_seqlens[-1])`` give o = 0 and zero gradients. On the CPU
            its values are checked at once (beside CUDA tensors too: it is copied); on a GPU by a
            kernel, see :func:`check_errors`.
        qk_l2norm: divides q and k by their norms, ``x * rsqrt(sum(x * x) + 1e-6)``.

    Returns:
        o ``[B, T, HV, V]`` in q's dtype, and the final state ``[N, HV, K, V]`` or None.
    """
    o, final_state = _chunk(
        q,
        k,
        v,
        beta,
        log_decay,
        rule=rule,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        qk_l2norm=qk_l2norm,
    )
    return o, final_state if output_final_state else None


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Optional[Tensor] = None,
    *,
    rule: Rule = "exact",
    scale: Optional[float] = None,
    initial_state: Optional[Tensor] = None,
    output_final_state: bool = False,
    cu_seqlens: Optional[Tensor] = None,
    qk_l2norm: bool = False,
) -> Tuple[Tensor, Optional[Tensor]]:
    """The same function as :func:`chunk`, computed token by token (better for few tokens)."""
    o, final_state = _recurrent(
        q,
        k,
        v,
        beta,
        log_decay,
        rule=rule,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        qk_l2norm=qk_l2norm,
    )
    return o, final_state if output_final_state else None


def step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: Tensor,
    log_decay: Optional[Tensor] = None,
    *,
    rule: Rule = "exact",
    scale: Optional[float] = None,
    state_indices: Optional[Tensor] = None,
    qk_l2norm: bool = False,
) -> Tensor:
    """One token per sequence, updating ``state`` in place; no gradient.

    Args:
        q, k: ``[B, H, K]``, or ``[B, T, H, K]`` with T <= 8.
        v: ``[B, HV, V]`` or ``[B, T, HV, V]``; beta and log_decay accordingly.
        state: ``[P, HV, K, V]`` float32 (float64 for float64 q). Updated through a copy, and so
            slower, if it is not contiguous; its elements must not share memory.
        state_indices: ``[B]`` int32 or int64, the state of each row, all distinct; -1 marks a
            padding row (o = 0, no state touched). By default row b uses state b, and P = B. On a
            GPU an index outside the pool is taken for padding, but for :func:`set_debug`.

    Returns:
        o, shaped like v. A call that raises leaves the state as it was.
    """
    return _step(
        q,
        k,
        v,
        beta,
        state,
        log_decay,
        rule=rule,
        scale=scale,
        state_indices=state_indices,
        qk_l2norm=qk_l2norm,
    )


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: Optional[float] = None,
    initial_state: Optional[Tensor] = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Optional[Tensor] = None,
    *,
    rule: Rule = "euler",
) -> Tuple[Tensor, Optional[Tensor]]:
    """DeltaNet under the signature of flash-linear-attention, so that one import line changes.

    ``rule="exact"`` makes it EFLA.
    """
    return chunk(
        q,
        k,
        v,
        beta,
        rule=rule,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        qk_l2norm=use_qk_l2norm_in_kernel,
    )


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: Optional[float] = None,
    initial_state: Optional[Tensor] = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Optional[Tensor] = None,
    *,
    rule: Rule = "euler",
) -> Tuple[Tensor, Optional[Tensor]]:
    """Gated DeltaNet under the signature of flash-linear-attention; ``g`` is the log-decay.

    ``rule="exact"`` or ``rule="exact_log"`` makes it gated EFLA.
    """
    return chunk(
        q,
        k,
        v,
        beta,
        g,
        rule=rule,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        qk_l2norm=use_qk_l2norm_in_kernel,
    )


def short_conv(
    x: Tensor,
    weight: Tensor,
    *,
    silu: bool = True,
    initial_state: Optional[Tensor] = None,
    output_final_state: bool = False,
    cu_seqlens: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
) -> Tuple[Tensor, Optional[Tensor]]:
    """Causal depthwise convolution over time.

    ``y[t] = act(bias + sum_w weight[:, w] * x[t - W + 1 + w])``

    Args:
        x: ``[B, T, D]``.
        weight: ``[D, W]``, float32 or x's dtype.
        silu: whether act is SiLU or nothing.
        initial_state: ``[N, D, W]`` in x's dtype, the last W inputs before the sequence, oldest first.
        output_final_state: whether to return the last W inputs of each sequence.
        cu_seqlens: as in :func:`chunk`.
        bias: ``[D]``, float32 or x's dtype; none by default.

    Returns:
        y ``[B, T, D]``, and the final state ``[N, D, W]`` or None.
    """
    y, final_state = _short_conv(
        x,
        weight,
        silu=silu,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        bias=bias,
    )
    return y, final_state if output_final_state else None


def rms_norm(
    x: Tensor,
    weight: Optional[Tensor] = None,
    eps: float = 1e-6,
    gate: Optional[Tensor] = None,
) -> Tensor:
    """``x * rsqrt(mean(x * x, -1) + eps) * weight [* silu(gate)]`` over the last dimension.

    weight ``[D]`` is float32 or has x's dtype; gate has x's shape and dtype.
    """
    return _rms_norm(x, weight, eps, gate)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``; both have one shape and dtype."""
    return _swiglu(gate, up)


def check_errors() -> None:
    """Waits for the GPUs and raises RuntimeError if a call there was given bad cu_seqlens.

    Values in GPU memory cannot be checked without waiting, so a kernel checks cu_seqlens. If the
    offsets decrease or pass the end, that call computes nothing (o and gradients are 0, states pass
    through), and the next operator on that GPU, or this function, raises. Replayed CUDA graphs are
    checked too.
    """
    _check_errors()


def set_debug(on: bool) -> None:
    """Whether :func:`step_` on a GPU waits and checks the values of state_indices first (also on with
    EFLA_DEBUG=1 in the environment; not inside a captured CUDA graph)."""
    _set_debug(on)
