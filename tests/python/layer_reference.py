"""The layers in float64 torch, written from docs/mathematics.md, "The layer"; differentiable."""

import torch
import torch.nn.functional as F
from reference import delta_rule, short_conv


def layer_output(layer, x, cu_seqlens=None):
    """What an efla.nn.EFLA or GatedEFLA must compute for x [B, T, hidden], from its parameters."""
    p = {name: parameter.double() for name, parameter in layer.named_parameters()}
    x = x.double()

    def linear(name):
        return x @ p[f"{name}_proj.weight"].T

    def stream(name, activation, heads):
        y = linear(name)
        if layer.use_short_conv:
            bias = p.get(f"{name}_conv1d.bias")
            silu = activation == "silu"
            weight = p[f"{name}_conv1d.weight"].squeeze(1)
            y, _ = short_conv(y, weight, silu, cu_seqlens=cu_seqlens, bias=bias)
            activation = "identity" if silu else activation
        activations = {
            "silu": F.silu,
            "relu": F.relu,
            "elu": lambda y: F.elu(y) + 1,
            "identity": lambda y: y,
        }
        return activations[activation](y).unflatten(-1, (heads, -1))

    def normalized(y, norm):
        if norm == "l2":
            return y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6)
        return y / y.sum(-1, keepdim=True) if norm == "sum" else y

    q = normalized(stream("q", layer.qk_activation, layer.num_heads), layer.q_norm)
    k = normalized(stream("k", layer.qk_activation, layer.num_heads), layer.qk_norm)
    v = stream("v", "silu", layer.num_v_heads)
    beta = torch.ones(v.shape[:3], dtype=torch.float64)
    if layer.use_beta:
        z = linear("b")
        beta = F.softplus(z) if layer.beta_activation == "softplus" else z.sigmoid()
    if layer.beta_activation == "adaptive":
        beta = beta * F.softplus(p["adaptive_decay"])
    if layer.allow_neg_eigval:
        beta = 2 * beta
    log_decay = None
    if layer.gated:
        log_decay = -p["A_log"].exp() * F.softplus(linear("a") + p["dt_bias"])
    o, _ = delta_rule(q, k, v, beta, log_decay, rule=layer.rule, cu_seqlens=cu_seqlens)
    if layer.use_output_norm:
        o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + layer.o_norm.eps)
        o = o * p["o_norm.weight"]
    if layer.use_gate:
        o = o * F.silu(linear("g").unflatten(-1, o.shape[-2:]))
    return o.flatten(-2) @ p["o_proj.weight"].T
