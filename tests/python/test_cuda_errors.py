"""Bad arguments on a GPU: a clear exception, and a device that goes on working."""

import efla
import pytest
import torch
from device_support import DEVICE, needs_gpu, on_device, poisoned_memory, problem

pytestmark = needs_gpu
BFLOAT16 = torch.bfloat16


def tensors_of(dtype=BFLOAT16, **sizes):
    sizes = {"batch": 1, "tokens": 70, "key_dim": 64, "value_dim": 64, **sizes}
    tensors = on_device(problem(dtype, **sizes), dtype)
    del tensors["grad_o"], tensors["grad_final_state"]
    return tensors


@pytest.fixture(autouse=True)
def device_goes_on_working():
    """After every test the operator still gives what it gave before."""
    tensors = tensors_of()
    expected, _ = efla.chunk(**tensors)
    yield
    torch.cuda.synchronize()
    efla.check_errors()
    assert torch.equal(efla.chunk(**tensors)[0], expected)


@pytest.mark.parametrize(
    "sizes,options,match",
    [
        (dict(key_dim=600), {}, "K may be at most 512"),
        (dict(value_dim=600), {}, "V may be at most 512"),
        ({}, dict(rule="heun"), "unknown rule"),
        (dict(decay=True), dict(rule="rk4"), "no form with log_decay"),
        ({}, dict(scale=float("nan")), "scale must be finite"),
    ],
)
@pytest.mark.parametrize("op", [efla.chunk, efla.recurrent])
def test_sizes_and_options(op, sizes, options, match):
    with pytest.raises(RuntimeError, match=match):
        op(**tensors_of(**sizes), **options)


def test_what_has_no_kernel():
    tensors = {n: None if t is None else t.double() for n, t in tensors_of().items()}
    with pytest.raises(RuntimeError, match="float64 has no CUDA kernel.*float32, bfloat16"):
        efla.chunk(**tensors)
    with pytest.raises(RuntimeError, match="v must have the dtype of q"):
        efla.chunk(**{**tensors_of(), "v": tensors_of()["v"].half()})
    wide = tensors_of(key_dim=300)
    o, _ = efla.chunk(**wide)  # token by token
    leaves = {n: t.requires_grad_() for n, t in wide.items() if t is not None}
    with pytest.raises(RuntimeError, match="K may be at most 256 where a gradient is needed"):
        efla.chunk(**leaves)[0].sum().backward()


@pytest.mark.parametrize("name", ["k", "v", "beta", "initial_state"])
def test_mixed_devices_are_named(name):
    tensors = tensors_of()
    tensors[name] = tensors[name].cpu()
    with pytest.raises(RuntimeError, match=f"{name} is on cpu"):
        efla.chunk(**tensors)


# --- Values of cu_seqlens --------------------------------------------------------------------------

BAD_OFFSETS = [
    ([0, 71], r"cu_seqlens\[1\] = 71"),
    ([0, 40, 30, 70], r"cu_seqlens\[2\] = 30"),
    ([-1, 70], r"cu_seqlens\[0\] = -1"),
    ([0, 2**31 - 1], r"cu_seqlens\[1\] = 2147483647"),
]


@pytest.mark.parametrize("offsets,match", BAD_OFFSETS)
@pytest.mark.parametrize("op", [efla.chunk, efla.recurrent])
def test_offsets_on_the_cpu_are_checked_at_once(op, offsets, match):
    tensors = tensors_of(cu_seqlens=offsets)
    with pytest.raises(RuntimeError, match=match):
        op(**tensors, cu_seqlens=torch.tensor(offsets))


@pytest.mark.parametrize("index_type", [torch.int32, torch.int64])
def test_offsets_on_the_cpu_are_copied(index_type):
    offsets = torch.tensor([0, 0, 20, 70], dtype=index_type)
    tensors = tensors_of(cu_seqlens=[0, 0, 20, 70])
    leaves = {n: t.requires_grad_() for n, t in tensors.items() if t is not None}
    results = []
    for cu_seqlens in (offsets, offsets.to(DEVICE)):
        o, _ = efla.chunk(**leaves, cu_seqlens=cu_seqlens)
        results.append([o, *torch.autograd.grad(o.sum(), list(leaves.values()))])
    assert all(torch.equal(x, y) for x, y in zip(*results))


@pytest.mark.parametrize("offsets,match", BAD_OFFSETS)
@pytest.mark.parametrize("index_type", [torch.int32, torch.int64])
@pytest.mark.parametrize("op", [efla.chunk, efla.recurrent])
def test_offsets_on_the_device_are_reported_later(op, offsets, match, index_type):
    """The call computes nothing and touches nothing; the next look at the record raises, once."""
    tensors = tensors_of(cu_seqlens=offsets)
    bad = torch.tensor(offsets, dtype=index_type, device=DEVICE)
    with poisoned_memory():
        o, final = op(**tensors, cu_seqlens=bad, output_final_state=True)
    with pytest.raises(RuntimeError, match=match):
        efla.check_errors()
    assert not o.any() and torch.equal(final, tensors["initial_state"])
    efla.check_errors()
    # Without check_errors the next call says it.
    op(**tensors, cu_seqlens=bad)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match=match):
        efla.chunk(**tensors_of())


def test_offsets_of_a_replayed_graph_are_checked():
    tensors = tensors_of(cu_seqlens=[0, 20, 70])
    offsets = torch.tensor([0, 20, 70], device=DEVICE)
    efla.chunk(**tensors, cu_seqlens=offsets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = efla.chunk(**tensors, cu_seqlens=offsets)
    graph.replay()
    efla.check_errors()
    offsets.copy_(torch.tensor([0, 80, 70]))
    graph.replay()
    with pytest.raises(RuntimeError, match=r"cu_seqlens\[1\] = 80"):
        efla.check_errors()
    assert not captured.any()
    offsets.copy_(torch.tensor([0, 20, 70]))
    graph.replay()
    efla.check_errors()
    assert captured.any()


def test_backward_with_bad_offsets_gives_zeros():
    tensors = tensors_of(cu_seqlens=[0, 20, 70])
    leaves = {n: t.requires_grad_() for n, t in tensors.items() if t is not None}
    offsets = torch.tensor([0, 99, 70], device=DEVICE)
    with poisoned_memory():
        o, _ = efla.chunk(**leaves, cu_seqlens=offsets)
        torch.cuda.synchronize()
        with pytest.raises(RuntimeError, match="cu_seqlens"):
            efla.check_errors()
        found = torch.autograd.grad(o.sum(), list(leaves.values()))
    with pytest.raises(RuntimeError, match="cu_seqlens"):
        efla.check_errors()
    assert not any(x.any() for x in found)


# --- Values of state_indices -----------------------------------------------------------------------


def one_token():
    """The tensors of a step of three rows, and a pool of three states."""
    tensors = tensors_of(batch=3, tokens=1)
    pool = tensors.pop("initial_state")
    return {n: None if t is None else t[:, 0] for n, t in tensors.items()}, pool


def test_state_indices_out_of_range_touch_nothing():
    tensors, pool = one_token()
    before = pool.clone()
    for bad in (3, -2, 2**40):
        indices = torch.tensor([0, bad, 2], device=DEVICE)
        pool.copy_(before)
        o = efla.step_(**tensors, state=pool, state_indices=indices)
        torch.cuda.synchronize()
        assert not o[1].any() and torch.equal(pool[1], before[1])
        assert not torch.equal(pool[0], before[0])


@pytest.mark.parametrize(
    "indices,match",
    [([0, 5, 1], r"state_indices\[1\] = 5"), ([-2, 1, 0], r"state_indices\[0\] = -2"),
     ([1, 0, 1], "names state 1 more than once")],
)  # fmt: skip
def test_state_indices_are_refused_in_debug(indices, match):
    tensors, pool = one_token()
    before = pool.clone()
    efla.set_debug(True)
    try:
        with pytest.raises(RuntimeError, match=match):
            efla.step_(**tensors, state=pool, state_indices=torch.tensor(indices, device=DEVICE))
        assert torch.equal(pool, before)
        efla.step_(**tensors, state=pool, state_indices=torch.tensor([2, -1, 0], device=DEVICE))
        assert not torch.equal(pool, before)
    finally:
        efla.set_debug(False)
