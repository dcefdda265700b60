"""Keys whose |k|^2 overflows float32 or nearly so, up to the largest finite numbers: the exact rules
follow them like any other (docs/mathematics.md, "Numerics").

On a GPU, or with EFLA_TEST_DEVICE=cpu on the CPU, against float64 there: its range holds their squares.
"""

import math

import cases
import efla
import pytest
import torch
from device_support import evaluate, expectation, needs_device, on_device

pytestmark = needs_device
FLOAT32, BFLOAT16, FLOAT64 = torch.float32, torch.bfloat16, torch.float64
EXACT = [("exact", False), ("exact", True), ("exact_log", True)]
DIMS = (32, 60, 64, 96, 100, 128)
# Relative to a row and to its natural size. Rows are short: their roundings hardly average.
LIMITS = {FLOAT32: 1e-4, BFLOAT16: 2e-2}
# Those of a number by itself do not: beta's gradient may be off by this of the product that it is, too, which
# is 4.5 times the limit of a whole tensor's RMS; by nothing else at the head sizes that only the portable
# kernels have in 16 bits.
LIMIT_OF_ONE = 4.5 * 6e-3
SMALLEST = {FLOAT32: 2.0**-149, BFLOAT16: 2.0**-134}

# token -> (|k|; infinite: every element the largest number, beta |k|^2 or None, whether |v| = |k|)
LONG = {
    0: (1e10, None, True),
    4: (1e12, 0.5, True),
    5: (1e18, 2.0, True),
    6: (1e19, None, True),
    11: (math.inf, None, False),
    40: (1e38, None, False),
    63: (1e25, None, True),
    64: (1e20, None, True),
    149: (1.5e19, None, True),
}


def scaled(x, length, dtype):
    """Rows of x at that length, within dtype's range and rounded to it."""
    most = torch.finfo(dtype).max
    x = (x * (length / x.norm(dim=-1, keepdim=True))).clamp(-most, most)
    return x.to(dtype).double()


def problem(dtype, dim, *, decay=False, l2norm=False, tokens=150, **sizes):
    x = cases.inputs(batch=1, tokens=tokens, heads=2, key_dim=dim, value_dim=dim, dtype=FLOAT64,
                     decay=decay, **sizes)  # fmt: skip
    for name in ("q", "k", "v"):
        x[name] = x[name].to(dtype).double()
    for token, (length, step, writes) in LONG.items():
        if token >= tokens:
            continue
        x["k"][:, token] = scaled(x["k"][:, token], length, dtype)
        if l2norm:
            x["q"][:, token] = scaled(x["q"][:, token], length, dtype)
            continue
        if writes:
            x["v"][:, token] = scaled(x["v"][:, token], length, dtype)
        if step is not None:
            x["beta"][:, token] = step / length**2
    g = torch.Generator().manual_seed(1)
    x["grad_o"] = torch.randn(x["v"].shape, generator=g, dtype=FLOAT64).to(dtype).double()
    x["grad_final_state"] = torch.randn(x["initial_state"].shape, generator=g, dtype=FLOAT64)
    return {
        n: None if t is None else t if n in ("q", "k", "v") else t.float().double()
        for n, t in x.items()
    }


def key_lengths(case, l2norm):
    k, heads = torch.linalg.vector_norm(case["k"], dim=-1), case["v"].shape[2]
    k = k.repeat_interleave(heads // k.shape[2], dim=2)
    return torch.ones_like(k) if l2norm else k


def product_size(expected, case, l2norm):
    """Natural size of beta's gradient as the product that it is, of two vectors of V numbers whose roundings
    are independent. dv = a dS^T k, a the exact rules' coefficient."""
    v, grad_v = (torch.linalg.vector_norm(t["v"], dim=-1) for t in (case, expected))
    k = key_lengths(case, l2norm)
    x = case["beta"] * k * k
    ds_k = grad_v * k * k / -torch.expm1(-x)
    return (torch.exp(-x) * ds_k * v / case["v"].shape[-1] ** 0.5).clamp(min=1)


def natural_size(name, expected, case, l2norm):
    """What a row's roundings are relative to, beside the row itself. A gradient of a key is as small as the
    key is long, so each row counts by itself."""
    if name == "k" or (name == "q" and l2norm):
        return (1 / torch.linalg.vector_norm(case[name], dim=-1)).clamp(max=1)
    if name == "beta":  # e^(-beta |k|^2) (dS^T k).(v - S^T k)
        v = torch.linalg.vector_norm(case["v"], dim=-1)
        k = key_lengths(case, l2norm)
        return (k * v * torch.exp(-case["beta"] * k * k)).clamp(min=1)
    if name == "log_decay":
        # <S, dS> of two states that are rounded, to 2^-9 in bfloat16: if independent, 1.6e-3 of
        # |S| |dS| / sqrt(K V). Three times that is LIMITS of a quarter.
        def product(x, y):
            return x.flatten(2).norm(dim=-1) * y.flatten(2).norm(dim=-1) / x[0, 0].numel() ** 0.5

        first = product(case["initial_state"], expected["initial_state"])
        last = product(expected["final_state"], case["grad_final_state"])
        return torch.maximum(first, last)[:, None] / 4
    return torch.ones(())


def row_failures(found, expected, case, dtype, l2norm=False):
    """Names of tensors with a row that is not as it should be."""
    bad = []
    for name, x in found.items():
        y, x = expected[name], x.double().cpu()
        if name in ("beta", "log_decay"):
            x, y = x[..., None], y[..., None]
        size = natural_size(name, expected, case, l2norm)
        if name in ("final_state", "initial_state"):
            x, y = x.flatten(2), y.flatten(2)
        error = (x - y).norm(dim=-1)
        limit = LIMITS[dtype] * (y.norm(dim=-1) + size)
        if name == "beta" and dtype == BFLOAT16:
            one = LIMIT_OF_ONE * (y.norm(dim=-1) + product_size(expected, case, l2norm))
            limit = one if case["k"].shape[-1] % 8 != 0 else torch.maximum(limit, one)
        limit = limit + SMALLEST[dtype] * y.shape[-1] ** 0.5
        if not (error <= limit).all():  # NaN fails too
            where = [tuple(i) for i in (~(error <= limit)).nonzero().tolist()]
            bad.append(f"{name}: {len(where)} rows, first {where[:3]}: {error[where[0]]:.1e}")
    return bad


@pytest.mark.parametrize("rule,decay", EXACT)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("value_heads", [2, 4])
def test_every_row_is_as_in_float64(rule, decay, dtype, value_heads):
    for dim in DIMS:
        case = problem(dtype, dim, decay=decay, value_heads=value_heads)
        expected = expectation(case, rule=rule)
        assert all(t.isfinite().all() for t in expected.values())
        for op in (efla.chunk, efla.recurrent):
            found = evaluate(op, case, dtype, rule=rule)
            assert not row_failures(found, expected, case, dtype), dim


@pytest.mark.parametrize("rule,decay", [(r, False) for r in ("linear", "euler", "rk4", "exact")]
                         + [(r, True) for r in ("euler", "exact", "exact_log")])  # fmt: skip
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_with_l2norm_their_length_does_not_count(rule, decay, dtype):
    for dim in DIMS:
        case = problem(dtype, dim, decay=decay, l2norm=True)
        options = dict(rule=rule, qk_l2norm=True)
        expected = expectation(case, **options)
        for op in (efla.chunk, efla.recurrent):
            found = evaluate(op, case, dtype, **options)
            assert not row_failures(found, expected, case, dtype, l2norm=True), dim


@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("dim", [64, 128, 60, 300])
def test_steps(dtype, dim, l2norm):
    case = problem(dtype, dim, decay=True, l2norm=l2norm, tokens=8)
    # Two next to each other, and the largest numbers.
    case["k"][:, 2:4] = scaled(case["k"][:, 2:4], math.inf, dtype)
    del case["grad_o"], case["grad_final_state"]
    state = case.pop("initial_state")

    def run(dtype, device=None):
        tensors = on_device(case, dtype, device)
        scalars = FLOAT64 if dtype == FLOAT64 else FLOAT32
        pool = state.to(tensors["q"].device, scalars, copy=True)
        return {"o": efla.step_(**tensors, state=pool, qk_l2norm=l2norm), "final_state": pool}

    expected, found = run(FLOAT64, "cpu"), run(dtype)
    assert not row_failures(found, expected, case, dtype), dim


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_a_row_with_an_infinite_element_ends_in_nan(dtype):
    case = problem(dtype, 64)
    case["k"][0, 80, 0, 3] = math.inf
    tensors = on_device(case, dtype)
    del tensors["grad_o"], tensors["grad_final_state"]
    for op in (efla.chunk, efla.recurrent):
        o, _ = op(**tensors)
        assert o[0, :64].isfinite().all() and o[0, :, 1].isfinite().all()
        assert o[0, 80:, 0].isnan().all()
