"""The operators of libefla_ops.so as Python functions (see the package's docstring for shapes)."""

from typing import Literal

import torch
from torch import Tensor

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
RULES: tuple[Rule, ...] = ("linear", "euler", "rk2", "rk4", "exact", "exact_log")


def chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    *,
    rule: Rule = "exact",
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    qk_l2norm: bool = False,
    recompute: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The delta-rule family over whole sequences, chunkwise parallel; differentiable once.

    Per value head, with the scalars (g, e, w) of the rule (docs/mathematics.md, "Step rules")::

        S_t = exp(g_t) (I - e_t k_t k_t^T) S_{t-1} + w_t k_t v_t^T        o_t = scale * S_t^T q_t

    Rule "exact" without decay is the step of arXiv 2512.12602: with lambda = |k|^2,
    e = w = (1 - exp(-beta * lambda)) / lambda.

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
        recompute: forward keeps nothing but the inputs, and backward goes over one half of the
            tokens after the other, with half the workspace. That takes the forward of the first half
            once more. Packed sequences go by halves of the heads instead (with one head not at all).
            For GPUs: on the CPU, which keeps few states otherwise, both halves' forwards are
            repeated, and the peak is not lower.

    Returns:
        o ``[B, T, HV, V]`` in q's dtype, and the final state ``[N, HV, K, V]`` or None.

    Raises:
        RuntimeError: an argument does not fit; the message names it and its shape. TypeError for an
            unknown keyword.
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
        recompute=recompute,
    )
    return o, final_state if output_final_state else None


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    *,
    rule: Rule = "exact",
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    qk_l2norm: bool = False,
    recompute: bool = False,
) -> tuple[Tensor, Tensor | None]:
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
        recompute=recompute,
    )
    return o, final_state if output_final_state else None


def step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: Tensor,
    log_decay: Tensor | None = None,
    *,
    rule: Rule = "exact",
    scale: float | None = None,
    state_indices: Tensor | None = None,
    qk_l2norm: bool = False,
) -> Tensor:
    """One token per sequence, updating ``state`` in place; no gradient.

    Args:
        q, k: ``[B, H, K]``, or ``[B, T, H, K]`` with T <= 8.
        v: ``[B, HV, V]`` or ``[B, T, HV, V]``; beta and log_decay accordingly.
        state: ``[P, HV, K, V]``; its dtype chooses how states are kept. float32 (float64 for float64
            q) loses nothing. bfloat16 (or float16) takes half the memory (and, so far, nearly the
            same time); the arithmetic is float32 all the same, and between the tokens of one call
            nothing is rounded. What it costs is one
            rounding of each state a call, by up to 2**-8 of each element (float16: 2**-11, and
            infinity beyond 65,504), 2**-9 in the root mean square. Errors of earlier calls fade as
            decay and erasing make the state forget; where it forgets nothing, n calls add up to
            about sqrt(n) * 2**-9. Changes of an element by less than its rounding are lost: a decay
            closer to 1 than 1 - 2**-9 does nothing, and a long run of small writes stops growing.
            Keep float32 for those. Updated through a copy, and so slower, if it is not contiguous,
            or float16 on the CPU; its elements must not share memory.
        state_indices: ``[B]`` int32 or int64, the state of each row, all distinct; -1 marks a
            padding row (o = 0, no state touched). By default row b uses state b, and P = B. On a
            GPU an index outside the pool is taken for padding, but for :func:`set_debug`.

    Returns:
        o, shaped like v. A call that raises leaves the state as it was.
    """
    o: Tensor = _step(
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
    return o


def short_conv(
    x: Tensor,
    weight: Tensor,
    *,
    silu: bool = True,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
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
    weight: Tensor | None = None,
    eps: float = 1e-6,
    gate: Tensor | None = None,
) -> Tensor:
    """``x * rsqrt(mean(x * x, -1) + eps) * weight [* silu(gate)]`` over the last dimension.

    weight ``[D]`` is float32 or has x's dtype; gate has x's shape and dtype.
    """
    y: Tensor = _rms_norm(x, weight, eps, gate)
    return y


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``; both have one shape and dtype."""
    y: Tensor = _swiglu(gate, up)
    return y


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
