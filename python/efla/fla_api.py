"""The delta-rule functions of flash-linear-attention (0.6), argument by argument.

Code written for ``fla.ops.delta_rule`` or ``fla.ops.gated_delta_rule`` changes its import line and
keeps its results; ``rule="exact"`` then turns DeltaNet into EFLA. Beyond fla's own, q, k and v may be
float32 or float64, and every function runs on the CPU.

What only steers fla's kernels (``chunk_size``, ``chunk_indices``, ``cu_seqlens_cpu``) is accepted
and has no effect. What has no counterpart here (``cp_context``, ``gk``, ``gv``) and what fla has
removed (``head_first``) is refused with ValueError.
"""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .operators import Rule, chunk, recurrent

_CHUNK_SIZES = (16, 32, 64)


def _refuse_leftovers(name: str, leftovers: dict[str, Any]) -> None:
    """Refuses what was removed or is unknown, and what fla checks although it has no effect here."""
    if "head_first" in leftovers:
        raise ValueError(
            f"{name}: head_first is not accepted; inputs are [B, T, H, ...], so transpose "
            "[B, H, T, ...] tensors with x.transpose(1, 2)"
        )
    chunk_size = leftovers.pop("chunk_size", 64)
    if chunk_size not in _CHUNK_SIZES:
        raise ValueError(f"{name}: chunk_size must be 16, 32 or 64, not {chunk_size!r}")
    if leftovers:
        raise TypeError(f"{name}: unexpected keyword argument {next(iter(leftovers))!r}")


def _refuse_given(name: str, argument: str, value: object, instead: str) -> None:
    if value is not None:
        raise ValueError(f"{name}: {argument} is not supported; {instead}")


def _float_of(x: Tensor) -> torch.dtype:
    """The type of the arithmetic of tensors like x: float32, or float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _scalars(x: Tensor, q: Tensor) -> Tensor:
    """Coefficients per token and head in a type that the operators take."""
    return x if x.dtype in (q.dtype, torch.float32) else x.to(_float_of(q))


def _beta(
    name: str, beta: Tensor | None, q: Tensor, v: Tensor, sigmoid: bool, allow_neg_eigval: bool
) -> Tensor:
    if allow_neg_eigval and not sigmoid:
        raise ValueError(f"{name}: allow_neg_eigval=True requires use_beta_sigmoid_in_kernel=True")
    if beta is None:
        beta = torch.ones_like(v[..., 0])
    if sigmoid:
        beta = beta.to(_float_of(q)).sigmoid()
        return 2 * beta if allow_neg_eigval else beta
    return _scalars(beta, q)


def _log_decay(
    name: str,
    g: Tensor | None,
    q: Tensor,
    in_kernel: bool,
    a_log: Tensor | None,
    dt_bias: Tensor | None,
) -> Tensor | None:
    """g, or ``-exp(A_log) * softplus(g + dt_bias)`` of a raw g."""
    if not in_kernel:
        return None if g is None else _scalars(g, q)
    if a_log is None:
        raise ValueError(f"{name}: use_gate_in_kernel=True requires A_log, of shape [HV]")
    if g is None:
        raise ValueError(f"{name}: use_gate_in_kernel=True requires g, of shape [B, T, HV]")
    dtype = _float_of(q)
    raw = g.to(dtype) if dt_bias is None else g.to(dtype) + dt_bias.to(dtype)
    return -(a_log.to(dtype).exp() * F.softplus(raw))


def _state(state: Tensor | None, q: Tensor, v_first: bool) -> Tensor | None:
    if state is None:
        return None
    state = state.to(_float_of(q))
    return state.transpose(-1, -2) if v_first else state


def _outputs(outputs: tuple[Tensor, Tensor | None], v_first: bool) -> tuple[Tensor, Tensor | None]:
    o, state = outputs
    if state is not None and v_first:
        state = state.transpose(-1, -2).contiguous()
    return o, state


def _v_first(name: str, v_first: bool, leftovers: dict[str, Any]) -> bool:
    """state_v_first, also by its older name."""
    if "transpose_state_layout" not in leftovers:
        return v_first
    if v_first:
        raise ValueError(
            f"{name}: give state_v_first or its older name transpose_state_layout, not both"
        )
    warnings.warn(
        "transpose_state_layout is now called state_v_first", DeprecationWarning, stacklevel=3
    )
    return bool(leftovers.pop("transpose_state_layout"))


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    rule: Rule = "euler",
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """DeltaNet, chunkwise: ``fla.ops.delta_rule.chunk_delta_rule``.

    Args:
        q, k: ``[B, T, H, K]``; v: ``[B, T, HV, V]`` (fla: HV = H); beta: ``[B, T, HV]``.
        scale: multiplies q; ``K ** -0.5`` by default.
        initial_state: ``[N, HV, K, V]``, any floating dtype.
        output_final_state: whether to return the final state, float32.
        use_qk_l2norm_in_kernel: divides q and k by their norms first.
        cu_seqlens: ``[N + 1]``, offsets of sequences packed along T; then B = 1.
        cu_seqlens_cpu: not needed here, no effect.
        rule: "euler" is DeltaNet, "exact" EFLA; any ungated rule of :func:`efla.chunk`.
        kwargs: ``chunk_size`` (no effect); anything else is refused.

    Returns:
        o ``[B, T, HV, V]`` in q's dtype, and the final state ``[N, HV, K, V]`` or None.
    """
    _refuse_leftovers("chunk_delta_rule", kwargs)
    return chunk(
        q,
        k,
        v,
        _scalars(beta, q),
        rule=rule,
        scale=scale,
        initial_state=_state(initial_state, q, False),
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        qk_l2norm=use_qk_l2norm_in_kernel,
    )


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    rule: Rule = "euler",
) -> tuple[Tensor, Tensor | None]:
    """DeltaNet token by token: ``fla.ops.delta_rule.fused_recurrent_delta_rule``.

    The arguments are those of :func:`chunk_delta_rule`; without beta it is 1.
    """
    return recurrent(
        q,
        k,
        v,
        _beta("fused_recurrent_delta_rule", beta, q, v, False, False),
        rule=rule,
        scale=scale,
        initial_state=_state(initial_state, q, False),
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
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,  # noqa: N803  fla's name
    dt_bias: Tensor | None = None,
    rule: Rule = "euler",
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet, chunkwise: ``fla.ops.gated_delta_rule.chunk_gated_delta_rule``.

    Args:
        q, k: ``[B, T, H, K]``; v: ``[B, T, HV, V]``, HV a multiple of H.
        g: log-decay ``[B, T, HV]``, at most 0; with use_gate_in_kernel the raw input of the gate,
            ``-exp(A_log) * softplus(g + dt_bias)``.
        beta: ``[B, T, HV]``; with use_beta_sigmoid_in_kernel its logits.
        scale: multiplies q; ``K ** -0.5`` by default.
        initial_state: ``[N, HV, K, V]`` (``[N, HV, V, K]`` with state_v_first), any floating dtype.
        output_final_state: whether to return the final state, float32, in the same layout.
        use_qk_l2norm_in_kernel: divides q and k by their norms first.
        use_beta_sigmoid_in_kernel: beta is the sigmoid of what is passed.
        allow_neg_eigval: beta is twice that sigmoid.
        state_v_first: the layout of the states; also under its older name transpose_state_layout.
        cu_seqlens: ``[N + 1]``, offsets of sequences packed along T; then B = 1.
        cu_seqlens_cpu, chunk_indices: not needed here, no effect.
        cp_context: refused (context parallelism).
        use_gate_in_kernel: see g.
        A_log, dt_bias: ``[HV]``, of the gate.
        rule: "euler" is Gated DeltaNet, "exact" and "exact_log" gated EFLA, "linear" Mamba-2.
        kwargs: ``chunk_size`` (no effect); anything else is refused.

    Returns:
        o ``[B, T, HV, V]`` in q's dtype, and the final state or None.
    """
    name = "chunk_gated_delta_rule"
    v_first = _v_first(name, state_v_first, kwargs)
    _refuse_leftovers(name, kwargs)
    _refuse_given(name, "cp_context", cp_context, "split the batch, not the sequence")
    outputs = chunk(
        q,
        k,
        v,
        _beta(name, beta, q, v, use_beta_sigmoid_in_kernel, allow_neg_eigval),
        _log_decay(name, g, q, use_gate_in_kernel, A_log, dt_bias),
        rule=rule,
        scale=scale,
        initial_state=_state(initial_state, q, v_first),
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        qk_l2norm=use_qk_l2norm_in_kernel,
    )
    return _outputs(outputs, v_first)


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    rule: Rule = "euler",
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet token by token: ``fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule``.

    The arguments are those of :func:`chunk_gated_delta_rule`; without beta it is 1, without g
    nothing decays. gk and gv (a decay per channel) are refused.
    """
    name = "fused_recurrent_gated_delta_rule"
    v_first = _v_first(name, state_v_first, kwargs)
    if kwargs:
        _refuse_leftovers(name, kwargs)
    for argument, value in (("gk", gk), ("gv", gv)):
        _refuse_given(name, argument, value, "the decay here is one number per head, g")
    outputs = recurrent(
        q,
        k,
        v,
        _beta(name, beta, q, v, use_beta_sigmoid_in_kernel, allow_neg_eigval),
        _log_decay(name, g, q, use_gate_in_kernel, A_log, dt_bias),
        rule=rule,
        scale=scale,
        initial_state=_state(initial_state, q, v_first),
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        qk_l2norm=use_qk_l2norm_in_kernel,
    )
    return _outputs(outputs, v_first)
