"""Outputs and all gradients on a GPU against float64: every rule, dtype, head size and layout, and the
inputs that break delta-rule kernels. The relative RMS limits are in device_support.py: LIMITS, and WIDER for
some of these inputs."""

import cases
import efla
import pytest
import torch
from device_support import (
    DEVICE,
    DTYPES,
    LIMITS,
    ON_GPU,
    OUTPUTS,
    SIXTEEN_BITS,
    WIDER,
    check,
    evaluate,
    expectation,
    failures,
    family,
    layout_problem,
    needs_device,
    on_device,
    poisoned_memory,
    problem,
    wider_limits,
)

pytestmark = needs_device


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("rule,decay", cases.RULES_AND_DECAY)
@pytest.mark.parametrize("key_dim,value_dim", cases.HEAD_SIZES)
def test_every_rule_dtype_head_size_and_layout(layout, rule, decay, key_dim, value_dim):
    bad = []
    for dtypes in (SIXTEEN_BITS, (torch.float32,)):
        case, options = layout_problem(
            layout, key_dim, value_dim, decay, dtypes is SIXTEEN_BITS
        )
        options = {**options, "rule": rule}
        expected = expectation(case, **options)
        for dtype in dtypes:
            where = f"{rule}{' decay' if decay else ''} {key_dim}x{value_dim} {layout}"
            found = evaluate(efla.chunk, case, dtype, **options)
            bad += failures(found, expected, dtype, f"chunk {where}")
            if layout == "packed":
                end = options["cu_seqlens"][-1]
                for name in ("o", "q", "k", "v", "beta"):
                    assert not found[name][:, end:].any(), (where, name)
            if key_dim in (64, 128):
                found = evaluate(efla.recurrent, case, dtype, **options)
                bad += failures(found, expected, dtype, f"recurrent {where}")
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize(
    "key_dim,value_dim",
    [(1, 1), (7, 3), (60, 100), (40, 104), (104, 8), (64, 128), (128, 64), (100, 512), (200, 72)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_head_sizes(key_dim, value_dim, dtype):
    # Few numbers do not average their roundings.
    slack = 2.0 if key_dim * value_dim < 100 else 1.0
    case = problem(
        dtype, batch=2, tokens=70, heads=2, value_heads=4, key_dim=key_dim, value_dim=value_dim,
        decay=True,
    )  # fmt: skip
    for op in (efla.chunk, efla.recurrent):
        check(op, case, dtype, where=f"{key_dim}x{value_dim}", slack=slack, qk_l2norm=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 6, 7, 8, 63, 64, 65, 100, 127, 128, 129, 500])
@pytest.mark.parametrize("dim", [64, 128])
def test_lengths(dtype, tokens, dim):
    slack = 2.0 if tokens <= 8 else 1.0
    sizes = dict(heads=4 if tokens <= 8 else 1, key_dim=dim, value_dim=dim)
    case = problem(dtype, batch=4 if tokens <= 8 else 1, tokens=tokens, **sizes)
    expected = expectation(case)
    for op in (efla.chunk, efla.recurrent):
        check(op, case, dtype, expected, where=f"T = {tokens}", slack=slack)


# --- Inputs that break kernels ---------------------------------------------------------------------


def generator():
    return torch.Generator().manual_seed(17)


def uniform(like, low, high):
    return low + (high - low) * torch.rand(like.shape, generator=generator(), dtype=torch.float64)


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


def set_norms(x, norms):
    """Gives the keys these norms [B, T, H]."""
    x["k"] = unit(x["k"]) * norms[..., None]


def scale_steps(x):
    """beta = what it was over |k|^2, so that rules that are no contractions stay stable."""
    groups = x["beta"].shape[-1] // x["k"].shape[2]
    x["beta"] = x["beta"] / x["k"].square().sum(-1).repeat_interleave(groups, -1)


def near_duplicate_keys(x):
    noise = torch.randn(x["k"].shape, generator=generator(), dtype=torch.float64)
    x["k"] = unit(unit(x["k"][:, :1]) + 1e-3 * unit(noise))


def identical_keys(x):
    x["k"] = unit(x["k"][:, :1]).expand_as(x["k"]).clone()


def zero_keys(x):
    x["k"][:, ::3] = 0


def vanishing_keys(x):
    # 1e-18: the squared norm is denormal in float32.
    set_norms(x, 10 ** uniform(x["k"][..., 0], -18, 0))
    x["k"][:, ::7] = 0


def small_keys(x):
    set_norms(x, 10 ** uniform(x["k"][..., 0], -2.5, 0))  # normal numbers in float16


def zero_steps(x):
    x["beta"] = 10 ** uniform(x["beta"], -8, 0)
    x["beta"][:, ::2] = 0


def all_steps_zero(x):
    x["beta"] *= 0


def large_steps(x):
    set_norms(x, torch.ones_like(x["k"][..., 0]))
    x["beta"] = 10 ** uniform(x["beta"], 0, 6)


def large_keys(x):
    set_norms(x, torch.full_like(x["k"][..., 0], 1000.0))  # beta |k|^2 to 1e6


def large_keys_small_steps(x):
    large_keys(x)
    scale_steps(x)


def wide_norms(x):
    set_norms(x, torch.exp(uniform(x["k"][..., 0], -6, 6)))


def wide_norms_small_steps(x):
    wide_norms(x)
    scale_steps(x)


def hard_resets(x):
    choice = torch.randint(0, 6, x["beta"].shape, generator=generator())
    x["log_decay"] = torch.tensor([0, -0.01, -5, -60, -300, -1000], dtype=torch.float64)[choice]


STABLE = [("exact", False), ("exact", True), ("exact_log", True)]
UNIT = [("euler", False), ("euler", True), ("rk2", False), ("rk4", False), *STABLE]
ALL = [("linear", False), ("linear", True), *UNIT]
WIDE = (torch.float32, torch.bfloat16)
EXTREMES = [
    (near_duplicate_keys, ALL, DTYPES),
    (identical_keys, UNIT, DTYPES),
    (zero_keys, ALL, DTYPES),
    (vanishing_keys, ALL, WIDE),
    (small_keys, UNIT, (torch.float16,)),
    (zero_steps, UNIT, DTYPES),
    (all_steps_zero, STABLE, DTYPES),
    (large_steps, STABLE, DTYPES),
    (large_keys, STABLE, DTYPES),
    (large_keys_small_steps, UNIT, DTYPES),
    (wide_norms, STABLE, WIDE),
    (wide_norms_small_steps, UNIT, WIDE),
    (hard_resets, [("linear", True), ("euler", True), ("exact", True), ("exact_log", True)], DTYPES),
]


@pytest.mark.parametrize("change,rules,dtypes", EXTREMES, ids=[e[0].__name__ for e in EXTREMES])
@pytest.mark.parametrize("dim", [64, 128, 96])
def test_extremes(change, rules, dtypes, dim):
    bad = []
    for rule, decay in rules:
        for dtype in dtypes:
            case = problem(
                dtype, batch=1, tokens=200, heads=1, value_heads=2, key_dim=dim, value_dim=dim,
                decay=decay, change=change,
            )  # fmt: skip
            expected = expectation(case, rule=rule)
            where = f"{change.__name__} {rule}{' decay' if decay else ''} {dim}"
            wider = wider_limits(change.__name__, dtype, dim, decay)
            found = evaluate(efla.chunk, case, dtype, rule=rule)
            bad += failures(found, expected, dtype, where, wider=wider)
            # Token by token in float, but the backward is that of chunk.
            wider = {name: row for name, row in wider.items() if name not in OUTPUTS}
            found = evaluate(efla.recurrent, case, dtype, rule=rule)
            bad += failures(found, expected, dtype, f"recurrent {where}", wider=wider)
    assert not bad, "\n".join(bad)


def test_wider_limits_are_of_inputs_that_are_tested():
    tested = {change.__name__: (rules, dtypes) for change, rules, dtypes in EXTREMES}
    for row in WIDER:
        general = LIMITS[row.dtype][0 if row.tensor in OUTPUTS else 1]
        assert row.limit > general or row.lost > 0, row
        for name in row.inputs:
            rules, dtypes = tested[name]
            assert row.dtype in dtypes, row
            assert not row.only_decay or any(decay for _, decay in rules), row


def test_steps_that_expand_the_state():
    """beta |k|^2 = 2.6 again and again on one key: the entries of (I + L)^-1 grow as 1.6^t, beyond what
    half holds, in which the portable kernels keep them."""

    def expand(x):
        identical_keys(x)
        x["beta"] = 2.6 + 0 * x["beta"]

    case = problem(
        torch.bfloat16, batch=1, tokens=40, heads=1, key_dim=96, value_dim=96, change=expand
    )
    # Zero columns change nothing; with four of them the size is the portable kernels' alone.
    for name in ("q", "k", "v", "grad_o"):
        case[name] = torch.nn.functional.pad(case[name], (0, 4))
    for name in ("initial_state", "grad_final_state"):
        case[name] = torch.nn.functional.pad(case[name], (0, 4, 0, 4))
    assert family(torch.bfloat16, 100) != "hopper"
    for op in (efla.chunk, efla.recurrent):
        # The last few tokens are all that counts.
        check(op, case, torch.bfloat16, where="expanding steps", slack=2.0, rule="euler", scale=96**-0.5)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("rule,decay", [("exact", False), ("exact_log", True)])
def test_a_long_sequence(dtype, rule, decay):
    def gentle(x):  # otherwise nothing of the first tokens is left at the end
        if decay:
            x["log_decay"] = x["log_decay"] * 1e-3

    tokens = 131072 if ON_GPU else 4096
    case = problem(
        dtype, batch=1, tokens=tokens, heads=1, key_dim=64, value_dim=64, decay=decay, change=gentle
    )
    check(efla.chunk, case, dtype, where=f"T = {tokens}", rule=rule)


def test_beta_and_decay_in_the_dtype_of_q():
    for dtype in SIXTEEN_BITS:
        case = problem(dtype, tokens=100, key_dim=64, value_dim=64, decay=True)
        for name in ("beta", "log_decay"):
            case[name] = case[name].to(dtype).double()
        expected = expectation(case)

        def op(q, k, v, beta, log_decay, initial_state, dtype=dtype, **options):
            scalars = [x.to(dtype) for x in (beta, log_decay)]
            return efla.chunk(q, k, v, *scalars, initial_state=initial_state, **options)

        check(op, case, dtype, expected, where="scalars of q's dtype")


@pytest.mark.parametrize("dim", [64, 128, 96])
@pytest.mark.parametrize("scale", [0.37, -2.5, 0.0])
def test_scale(scale, dim):
    case = problem(torch.bfloat16, tokens=100, key_dim=dim, value_dim=dim)
    for op in (efla.chunk, efla.recurrent):
        check(op, case, torch.bfloat16, where=f"scale {scale}", scale=scale)


@pytest.mark.parametrize("dim", [64, 128, 96])
@pytest.mark.parametrize("tokens,heads", [(200, 2), (1500, 1), (100, 40)])
def test_initial_state_gradient_where_keys_repeat(tokens, heads, dim):
    """Repeated keys erase one direction of it; what is left is a sum of q dO^T, which is exact but for
    its additions unless an operand, times the scale, is rounded: to bfloat16 that is 1.4e-3, and so it is
    in the portable kernels."""
    case = problem(
        torch.bfloat16, batch=1, tokens=tokens, heads=heads, key_dim=dim, value_dim=dim,
        change=identical_keys,
    )  # fmt: skip
    found = evaluate(efla.chunk, case, torch.bfloat16, rule="euler")["initial_state"]
    expected = expectation(case, rule="euler")["initial_state"]
    error = (found.double().cpu() - expected).norm() / expected.norm()
    assert error < (2e-3 if family(torch.bfloat16, dim) == "portable" else 5e-4), error


# --- What need not be there ------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [64, 128, 96])
@pytest.mark.parametrize("state", [False, True], ids=["no state", "state"])
@pytest.mark.parametrize("used", [("o",), ("final_state",), ("o", "final_state")], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_absent_states_and_gradients(dim, state, used, packed):
    """Whatever is absent, every gradient that is asked for is written, dh0 among them."""
    dtype = torch.bfloat16
    offsets = [0, 0, 64, 100, 100] if packed else None
    case = problem(
        dtype, batch=1 if packed else 2, tokens=100, key_dim=dim, value_dim=dim, cu_seqlens=offsets
    )
    if not state:
        case["initial_state"] = None
    for name in {"o", "final_state"} - set(used):
        case[f"grad_{name}"] *= 0
    expected = expectation(case, cu_seqlens=offsets)

    leaves = on_device(case, dtype)
    grads = [leaves.pop("grad_o"), leaves.pop("grad_final_state")]
    grads = dict(zip(("o", "final_state"), grads))
    leaves = {n: t.requires_grad_() for n, t in leaves.items() if t is not None}
    with poisoned_memory():
        o, final = efla.chunk(
            **leaves,
            output_final_state="final_state" in used,
            cu_seqlens=None if offsets is None else torch.tensor(offsets, device=DEVICE),
        )
        results = {"o": o, "final_state": final}
        found = torch.autograd.grad(
            [results[n] for n in used], list(leaves.values()), [grads[n] for n in used]
        )
    found = {**{n: results[n].detach() for n in used}, **dict(zip(leaves, found))}
    bad = failures(found, expected, dtype, f"only {used} used")
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("op", [efla.chunk, efla.recurrent])
def test_without_gradients_nothing_is_kept(op):
    case = problem(torch.bfloat16, tokens=100, key_dim=64, value_dim=64)
    tensors = on_device(case, torch.bfloat16)
    del tensors["grad_o"], tensors["grad_final_state"]
    with poisoned_memory():
        o, final = op(**tensors)
    assert final is None and not o.requires_grad
    expected = expectation(case)
    assert not failures({"o": o}, expected, torch.bfloat16, "inference")
