"""Option recompute: the same gradients from half the workspace, and nothing kept. On a GPU, or with
EFLA_TEST_DEVICE=cpu on the CPU."""

import cases
import efla
import pytest
import torch
from device_support import (
    DEVICE,
    DTYPES,
    check,
    evaluate,
    expectation,
    failures,
    family,
    needs_device,
    needs_gpu,
    on_device,
    problem,
)

pytestmark = needs_device

SHAPES = {
    "one token": dict(batch=2, tokens=1),
    "one chunk": dict(tokens=64),
    "halves of a chunk and a token": dict(tokens=65),
    "odd": dict(batch=2, tokens=331, heads=2, value_heads=4),
    "many chunks": dict(batch=1, tokens=1200, heads=1, value_heads=3),
    "packed": dict(batch=1, tokens=300, heads=3, value_heads=6, cu_seqlens=[2, 2, 70, 71, 290]),
    "packed, one head": dict(batch=1, tokens=200, heads=1, cu_seqlens=[0, 130, 200]),
    "packed, empty": dict(batch=1, tokens=5, heads=2, cu_seqlens=[0, 0]),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", [efla.chunk, efla.recurrent])
def test_gradients(op, shape, decay, dtype):
    sizes = SHAPES[shape]
    options = {"cu_seqlens": sizes.get("cu_seqlens"), "qk_l2norm": shape == "odd"}
    case = problem(dtype, key_dim=32, value_dim=64, decay=decay, **sizes)
    expected = expectation(case, **options)
    check(op, case, dtype, expected, where=shape, recompute=True, **options)


@pytest.mark.parametrize("rule", efla.RULES)
def test_every_rule(rule):
    case = problem(torch.float32, tokens=150, key_dim=16, value_dim=16)
    expected = expectation(case, rule=rule)
    check(efla.chunk, case, torch.float32, expected, where=rule, rule=rule, recompute=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(dtype):
    case = problem(dtype, batch=2, tokens=200, heads=2, key_dim=64, value_dim=64)
    expected = expectation(case)
    found = evaluate(
        lambda q, k, v, **rest: efla.chunk(
            *(cases.strided(t, "transposed heads") for t in (q, k, v)), **rest
        ),
        case,
        dtype,
        recompute=True,
    )
    bad = failures(found, expected, dtype, "transposed heads")
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("cu_seqlens", [None, [0, 90, 150]])
@pytest.mark.parametrize("names", [["v"], ["beta", "initial_state"], ["q", "k"]])
def test_some_gradients(names, cu_seqlens):
    batch = 2 if cu_seqlens is None else 1
    case = problem(torch.float32, batch=batch, tokens=150, cu_seqlens=cu_seqlens)
    expected = expectation(case, cu_seqlens=cu_seqlens)
    x = on_device(case, torch.float32)
    grad_o = x.pop("grad_o")
    grad_final_state = x.pop("grad_final_state")
    x = {n: t for n, t in x.items() if t is not None}
    for name in names:
        x[name].requires_grad_()
    offsets = None if cu_seqlens is None else torch.tensor(cu_seqlens, device=DEVICE)
    o, final = efla.chunk(**x, cu_seqlens=offsets, output_final_state=True, recompute=True)
    grads = torch.autograd.grad([o, final], [x[n] for n in names], [grad_o, grad_final_state])
    found = dict(zip(names, grads))
    bad = failures(found, expected, torch.float32, "some")
    assert not bad, "\n".join(bad)


def test_without_states():
    """No initial state, and no gradient of a final one."""
    case = problem(torch.float32, tokens=140)
    x = on_device(case, torch.float32)
    x = {n: x[n].requires_grad_() for n in ("q", "k", "v", "beta")}
    grads = [
        torch.autograd.grad(efla.chunk(**x, recompute=again)[0].square().sum(), list(x.values()))
        for again in (False, True)
    ]
    for name, a, b in zip(x, *grads):
        assert ((a - b).norm() <= 1e-5 * a.norm()).item(), name


@pytest.mark.parametrize("tokens", [1100, 4200])  # Hopper splits the latter
@pytest.mark.parametrize("packed", [False, True])
def test_nothing_is_kept_but_the_inputs(packed, tokens):
    cu_seqlens = [0, 600, tokens] if packed else None
    case = problem(
        torch.bfloat16, batch=1, tokens=tokens, key_dim=64, value_dim=64, cu_seqlens=cu_seqlens
    )
    x = on_device(case, torch.bfloat16)
    x = {n: t.requires_grad_() for n, t in x.items() if t is not None and "grad" not in n}
    offsets = torch.tensor(cu_seqlens, device=DEVICE) if packed else None
    saved = []

    def pack(t):
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        efla.chunk(**x, cu_seqlens=offsets, recompute=True)
    own = {t.untyped_storage().data_ptr() for t in (*x.values(), offsets) if t is not None}
    beside = [t for t in saved if t.untyped_storage().data_ptr() not in own]
    assert len(saved) - len(beside) >= len(x)
    assert sum(t.untyped_storage().nbytes() for t in beside) == 0


@needs_gpu
@pytest.mark.parametrize("packed", [False, True])
def test_half_the_workspace(packed):
    """Of what backward allocates beside the gradients."""
    heads, tokens = 16, 8192
    case = problem(torch.bfloat16, batch=1, tokens=tokens, heads=heads, key_dim=128, value_dim=128)
    x = on_device(case, torch.bfloat16)
    grad_o = x["grad_o"]
    x = {n: x[n].requires_grad_() for n in ("q", "k", "v", "beta")}
    offsets = None
    if packed:
        offsets = torch.arange(0, tokens + 1, 512, device=DEVICE)
    gradients = sum(t.untyped_storage().nbytes() for t in x.values())

    def workspace(recompute):
        o, _ = efla.chunk(**x, cu_seqlens=offsets, recompute=recompute)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(o, list(x.values()), grad_o)
        return torch.cuda.max_memory_allocated() - before - gradients

    whole, half = workspace(False), workspace(True)
    assert whole > 800 * tokens * heads if family(torch.bfloat16, 128) == "hopper" else whole > 0
    assert half < 0.6 * whole
