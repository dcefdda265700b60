"""Random inputs of the operators' tests, and the table of problems that every device is tested on."""

import torch

RULES = ("linear", "euler", "rk2", "rk4", "exact", "exact_log")
GATED_RULES = ("linear", "euler", "exact", "exact_log")
RULES_AND_DECAY = [(r, False) for r in RULES] + [(r, True) for r in GATED_RULES]

# Layouts and head sizes that test_cuda_accuracy.py crosses with every rule and dtype. An empty sequence
# first, in the middle and last, and rows past all sequences; three value heads to a key head.
LAYOUTS = {
    "dense": dict(batch=2, tokens=150, heads=2),
    "packed": dict(batch=1, tokens=300, heads=2, cu_seqlens=[0, 0, 70, 70, 199, 290, 290]),
    "grouped": dict(batch=1, tokens=130, heads=2, value_heads=6, qk_l2norm=True),
}
HEAD_SIZES = [(32, 32), (64, 64), (96, 96), (128, 128), (256, 256)]

# Error allowed in outputs and gradients: a few units of the storage type.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 1.5e-2, torch.float16: 3e-3}


def inputs(
    batch=2,
    tokens=19,
    heads=2,
    value_heads=None,
    key_dim=8,
    value_dim=6,
    dtype=torch.float32,
    decay=False,
    sequences=None,
    seed=0,
):
    """A dict of q, k, v, beta, log_decay (None without decay) and initial_state.

    Key norms near 1, so that every rule is a stable recurrence.
    """
    g = torch.Generator().manual_seed(seed)
    value_heads = value_heads or heads
    arithmetic = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def uniform(*shape):
        return torch.rand(*shape, generator=g, dtype=torch.float64)

    scalars = (batch, tokens, value_heads)
    return {
        "q": normal(batch, tokens, heads, key_dim).to(dtype),
        "k": (normal(batch, tokens, heads, key_dim) * key_dim**-0.5).to(dtype),
        "v": normal(batch, tokens, value_heads, value_dim).to(dtype),
        "beta": (0.1 + 0.8 * uniform(*scalars)).to(arithmetic),
        "log_decay": (-0.3 * uniform(*scalars)).to(arithmetic) if decay else None,
        "initial_state": normal(
            batch if sequences is None else sequences, value_heads, key_dim, value_dim
        ).to(arithmetic),
    }


def differentiable(tensors):
    """Copies of the tensors of a dict that are leaves with requires_grad."""
    return {
        name: None if t is None else t.detach().clone().requires_grad_(True)
        for name, t in tensors.items()
    }


def strided(t, how):
    """The same values under other strides."""
    if t is None:
        return None
    if how == "transposed tokens":
        return t.transpose(0, 1).contiguous().transpose(0, 1)
    if how == "transposed heads" and t.dim() >= 3:
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "last dimension not contiguous":
        return torch.stack([t, torch.full_like(t, float("nan"))], -1)[..., 0]
    if how == "slice of a wider tensor":
        return torch.cat([torch.full_like(t, float("nan")), t], -1)[..., t.shape[-1] :]
    if how == "odd first address":
        flat = torch.cat([t.new_full((1,), float("nan")), t.reshape(-1)])
        return flat[1:].view(t.shape)
    return t
