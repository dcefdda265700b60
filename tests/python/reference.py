"""The recurrence token by token in float64 torch, written from docs/mathematics.md, "Step rules".

Differentiable, so that it is the oracle of gradients too.
"""

import torch


def phi(x):
    """(1 - exp(-x)) / x; the series where the quotient would lose digits."""
    small = x.abs() < 1e-3
    safe = torch.where(small, torch.ones_like(x), x)
    series = 1 - x / 2 + x**2 / 6 - x**3 / 24 + x**4 / 120
    return torch.where(small, series, -torch.expm1(-safe) / safe)


def coefficients(rule, beta, lam, log_decay):
    """(log gate, erase, write) of one token; log_decay None means no decay."""
    x = beta * lam
    g = torch.zeros_like(beta) if log_decay is None else log_decay
    if rule == "linear":
        return g, torch.zeros_like(beta), beta
    if rule == "euler":
        return g, beta, beta
    if rule == "rk2":
        return g, beta * (1 - x / 2), beta * (1 - x / 2)
    if rule == "rk4":
        c = beta * (1 - x / 2 + x**2 / 6 - x**3 / 24)
        return g, c, c
    if rule == "exact" and log_decay is not None:
        a = torch.exp(g)
        return a - 1, a * beta * phi(a * x), beta * phi(1 - a + a * x)
    return g, beta * phi(x), beta * phi(x - g)


def delta_rule(
    q,
    k,
    v,
    beta,
    log_decay=None,
    *,
    rule="exact",
    scale=None,
    initial_state=None,
    cu_seqlens=None,
    qk_l2norm=False,
):
    """(o, final state) in float64."""
    q, k, v, beta = (t.double() for t in (q, k, v, beta))
    log_decay = None if log_decay is None else log_decay.double()
    if qk_l2norm:
        q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + 1e-6)
        k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6)
    batch, tokens, heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    scale = key_dim**-0.5 if scale is None else scale
    q = q.repeat_interleave(value_heads // heads, 2)
    k = k.repeat_interleave(value_heads // heads, 2)
    gate, erase, write = coefficients(rule, beta, (k * k).sum(-1), log_decay)
    if cu_seqlens is None:
        spans = [(b, 0, tokens) for b in range(batch)]
    else:
        offsets = cu_seqlens.tolist()
        spans = [(0, s, e) for s, e in zip(offsets[:-1], offsets[1:])]
    rows = {}
    finals = []
    for n, (b, start, end) in enumerate(spans):
        if initial_state is None:
            state = torch.zeros(value_heads, key_dim, value_dim, dtype=torch.float64)
        else:
            state = initial_state[n].double()
        for t in range(start, end):
            kt, vt = k[b, t], v[b, t]
            read = torch.einsum("hk,hkv->hv", kt, state)
            state = state - erase[b, t][:, None, None] * torch.einsum("hk,hv->hkv", kt, read)
            state = torch.exp(gate[b, t])[:, None, None] * state
            state = state + write[b, t][:, None, None] * torch.einsum("hk,hv->hkv", kt, vt)
            rows[b, t] = scale * torch.einsum("hk,hkv->hv", q[b, t], state)
        finals.append(state)
    zero = torch.zeros(value_heads, value_dim, dtype=torch.float64)
    if batch * tokens:
        o = torch.stack(
            [torch.stack([rows.get((b, t), zero) for t in range(tokens)]) for b in range(batch)]
        )
    else:
        o = torch.zeros(batch, tokens, value_heads, value_dim, dtype=torch.float64)
    if not finals:
        return o, torch.zeros(0, value_heads, key_dim, value_dim, dtype=torch.float64)
    return o, torch.stack(finals)


def short_conv(x, weight, silu, initial_state=None, cu_seqlens=None, bias=None):
    """(y, final state) in float64."""
    x, weight = x.double(), weight.double()
    bias = None if bias is None else bias.double()  # once: its gradient is summed in float64
    batch, tokens, channels = x.shape
    width = weight.shape[1]
    if cu_seqlens is None:
        spans = [(b, 0, tokens) for b in range(batch)]
    else:
        offsets = cu_seqlens.tolist()
        spans = [(0, s, e) for s, e in zip(offsets[:-1], offsets[1:])]
    y = torch.zeros(batch, tokens, channels, dtype=torch.float64)
    finals = []
    for n, (b, start, end) in enumerate(spans):
        if initial_state is None:
            past = torch.zeros(width, channels, dtype=torch.float64)
        else:
            past = initial_state[n].double().T
        line = torch.cat([past, x[b, start:end]])
        for t in range(start, end):
            window = line[t - start + 1 : t - start + 1 + width]
            total = (window * weight.T).sum(0)
            if bias is not None:
                total = total + bias
            y = y.index_put(
                (torch.tensor(b), torch.tensor(t)),
                torch.nn.functional.silu(total) if silu else total,
            )
        finals.append(line[-width:].T)
    return y, torch.stack(finals) if finals else torch.zeros(0, channels, width).double()


def relative_error(actual, expected):
    """Root mean square of the difference over that of the expectation."""
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-30)).item()
