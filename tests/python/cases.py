"""Random inputs of the operators' tests."""

import torch

RULES = ("linear", "euler", "rk2", "rk4", "exact", "exact_log")
GATED_RULES = ("linear", "euler", "exact", "exact_log")
RULES_AND_DECAY = [(r, False) for r in RULES] + [(r, True) for r in GATED_RULES]

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
