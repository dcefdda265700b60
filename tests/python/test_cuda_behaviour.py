"""What the operators promise on a GPU beside their values: layouts, determinism, CUDA graphs, streams,
devices, torch.compile, sizes beyond 32 bits, memory."""

import os

import efla
import pytest
import torch
from cases import strided
from device_support import (
    DEVICE,
    ON_GPU,
    check,
    evaluate,
    expectation,
    failures,
    needs_device,
    needs_gpu,
    on_device,
    poisoned_memory,
    problem,
)

pytestmark = needs_device
REPEATS = int(os.environ.get("EFLA_TEST_REPEATS", 1000 if ON_GPU else 3))
BFLOAT16 = torch.bfloat16


def same(found, expected):
    """Names of the tensors that are not bitwise equal."""
    return [n for n in expected if not torch.equal(found[n], expected[n])]


def test_the_poison_is_there():
    with poisoned_memory():
        assert torch.empty(100, device=DEVICE).isnan().all()
        assert torch.empty(100, device=DEVICE, dtype=BFLOAT16).isnan().all()
        assert torch.empty(400, device=DEVICE, dtype=torch.uint8).view(torch.float32).isnan().all()


# --- Packed sequences ------------------------------------------------------------------------------

OFFSETS = {
    "empty first": [0, 0, 70, 200],
    "empty in the middle": [0, 70, 70, 70, 200],
    "empty last": [0, 70, 200, 200],
    "only empty": [5, 5, 5],
    "one": [0, 200],
    "rows before and after": [3, 64, 128, 129, 190],
    "single tokens": list(range(0, 30)) + [200],
}


@pytest.mark.parametrize("name", OFFSETS)
@pytest.mark.parametrize("dim", [64, 128, 96])
@pytest.mark.parametrize("index_type", [torch.int32, torch.int64])
def test_packed(name, dim, index_type):
    offsets = OFFSETS[name]
    case = problem(
        BFLOAT16, batch=1, tokens=200, heads=2, value_heads=4, key_dim=dim, value_dim=dim,
        decay=True, cu_seqlens=offsets,
    )  # fmt: skip
    expected = expectation(case, cu_seqlens=offsets)
    outside = torch.ones(200, dtype=torch.bool)
    outside[offsets[0] : offsets[-1]] = False
    for tensor in ("q", "k", "v", "beta", "log_decay", "grad_o"):
        case[tensor][:, outside] = float("nan")  # whatever they hold
    offsets = torch.tensor(offsets, dtype=index_type)
    for op in (efla.chunk, efla.recurrent):
        found = evaluate(op, case, BFLOAT16, cu_seqlens=offsets)
        bad = failures(found, expected, BFLOAT16, f"{name} {dim}")
        assert not bad, "\n".join(bad)
        for tensor in ("o", "q", "k", "v", "beta", "log_decay"):
            assert not found[tensor][:, outside].any(), tensor
        # An empty sequence passes its state and the state's gradient through, bit by bit.
        for n in (offsets.diff() == 0).nonzero().flatten().tolist():
            assert torch.equal(found["final_state"][n].cpu(), case["initial_state"][n].float())
            assert torch.equal(
                found["initial_state"][n].cpu(), case["grad_final_state"][n].float()
            )


def test_no_sequences_and_no_tokens():
    for sizes in (dict(batch=1, tokens=4, cu_seqlens=[0]), dict(batch=2, tokens=0), dict(batch=0, tokens=5)):
        offsets = sizes.get("cu_seqlens")
        case = problem(BFLOAT16, key_dim=64, value_dim=64, **sizes)
        for op in (efla.chunk, efla.recurrent):
            found = evaluate(op, case, BFLOAT16, cu_seqlens=offsets)
            assert not found["o"].any() and not found["k"].any()
            assert torch.equal(found["final_state"].cpu(), case["initial_state"].float())
            assert torch.equal(found["initial_state"].cpu(), case["grad_final_state"].float())


@pytest.mark.parametrize("dim", [64, 128, 96])
def test_split_equals_whole(dim):
    case = problem(BFLOAT16, tokens=300, key_dim=dim, value_dim=dim, decay=True)
    whole = evaluate(efla.chunk, case, BFLOAT16)
    tensors = on_device(case, BFLOAT16)
    state = tensors["initial_state"]
    pieces = []
    for start, end in [(0, 1), (1, 130), (130, 130), (130, 300)]:
        piece = {n: tensors[n][:, start:end] for n in ("q", "k", "v", "beta", "log_decay")}
        o, state = efla.chunk(**piece, initial_state=state, output_final_state=True)
        pieces.append(o)
    expected = {n: whole[n].double().cpu() for n in ("o", "final_state")}
    found = {"o": torch.cat(pieces, 1), "final_state": state}
    assert not failures(found, expected, BFLOAT16, "split", slack=1.5)  # two roundings


def test_a_sequence_does_not_see_its_neighbours():
    for sizes in (dict(batch=3, tokens=150), dict(batch=1, tokens=150, cu_seqlens=[0, 50, 100, 150])):
        offsets = sizes.get("cu_seqlens")
        case = problem(BFLOAT16, key_dim=128, value_dim=128, decay=True, **sizes)
        alone = evaluate(efla.chunk, case, BFLOAT16, cu_seqlens=offsets)
        for t in case.values():
            t[0, :50] = float("nan")  # the first sequence, and states' first rows
        found = evaluate(efla.chunk, case, BFLOAT16, cu_seqlens=offsets)
        for name, x in found.items():
            y = alone[name]
            if offsets is None or name in ("final_state", "initial_state"):
                assert torch.equal(x[1:], y[1:]), name
            else:
                assert torch.equal(x[:, 50:], y[:, 50:]), name


# --- Strides ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [64, 128, 96])
@pytest.mark.parametrize(
    "how",
    ["transposed tokens", "transposed heads", "last dimension not contiguous",
     "slice of a wider tensor", "odd first address"],
)  # fmt: skip
def test_any_strides(dim, how):
    case = problem(BFLOAT16, tokens=100, value_heads=4, key_dim=dim, value_dim=dim, decay=True)

    def moved(q, k, v, beta, log_decay, initial_state, **options):
        tensors = [strided(t, how) for t in (q, k, v, beta, log_decay, initial_state)]
        o, final = efla.chunk(*tensors[:5], initial_state=tensors[5], **options)
        return Restride.apply(o, how), final

    expected = evaluate(efla.chunk, case, BFLOAT16)
    assert not same(evaluate(moved, case, BFLOAT16), expected)


class Restride(torch.autograd.Function):
    """The identity, whose gradient has other strides."""

    @staticmethod
    def forward(ctx, x, how):
        ctx.how = how
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return strided(grad, ctx.how), None


def test_expanded_inputs_and_gradients():
    case = on_device(problem(BFLOAT16, tokens=70, key_dim=64, value_dim=64), BFLOAT16)
    k = case["k"][:, :1].expand(-1, 70, -1, -1)
    beta = torch.full((1, 1, 1), 0.5, device=DEVICE).expand(2, 70, 2)
    results = []
    for tensors in ((case["q"], k, case["v"], beta), [x.contiguous() for x in (case["q"], k, case["v"], beta)]):
        leaves = [x.detach().requires_grad_() for x in tensors]
        o, _ = efla.chunk(*leaves)
        grad = torch.ones((), device=DEVICE, dtype=BFLOAT16).expand(o.shape)
        results.append([o, *torch.autograd.grad(o, leaves, grad)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


# --- Determinism -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype,dim", [(BFLOAT16, 128), (BFLOAT16, 64), (torch.float16, 128), (torch.float32, 64)]
)
def test_repeats_are_bitwise_the_same(dtype, dim):
    offsets = [0, 1, 65, 65, 190]
    case = problem(
        dtype, batch=1, tokens=200, heads=2, value_heads=4, key_dim=dim, value_dim=dim, decay=True,
        cu_seqlens=offsets,
    )  # fmt: skip
    tensors = on_device(case, dtype)
    grads = [tensors.pop("grad_o"), tensors.pop("grad_final_state")]
    leaves = {n: t.requires_grad_() for n, t in tensors.items()}
    cu_seqlens = torch.tensor(offsets, device=DEVICE)

    def once():
        out = efla.chunk(**leaves, output_final_state=True, cu_seqlens=cu_seqlens, qk_l2norm=True)
        return [*out, *torch.autograd.grad(out, list(leaves.values()), grads)]

    expected = once()
    differ = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(REPEATS):
        for x, y in zip(once(), expected):
            differ += (x != y).any()
    assert differ.item() == 0


@pytest.mark.parametrize("dim", [128, 64, 96])
def test_repeats_of_a_full_device(dim):
    shape = (4, 2048, 16, dim) if ON_GPU else (2, 130, 2, dim)
    g = torch.Generator(DEVICE).manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, device=DEVICE, dtype=BFLOAT16, generator=g)

    leaves = [normal(*shape), normal(*shape) / dim**0.5, normal(*shape), normal(*shape[:3]).sigmoid()]
    leaves = [x.requires_grad_() for x in leaves]
    grad = normal(*shape)

    def once():
        o, _ = efla.chunk(*leaves)
        return [o, *torch.autograd.grad(o, leaves, grad)]

    expected = once()
    for _ in range(20 if ON_GPU else 2):
        assert all(torch.equal(x, y) for x, y in zip(once(), expected))


# --- CUDA graphs, streams, devices, torch.compile --------------------------------------------------


def leaves_and_gradients(case, dtype=BFLOAT16, device=None):
    tensors = on_device(case, dtype, device)
    grads = [tensors.pop("grad_o"), tensors.pop("grad_final_state")]
    return {n: t.requires_grad_() for n, t in tensors.items() if t is not None}, grads


def forward_and_backward(leaves, grads, op=efla.chunk, **options):
    out = op(**leaves, output_final_state=True, **options)
    return [*out, *torch.autograd.grad(out, list(leaves.values()), grads)]


@needs_gpu
@pytest.mark.parametrize("dim", [64, 128, 96])
@pytest.mark.parametrize("index_type", [torch.int32, torch.int64])
def test_graph_replay_follows_contents_and_offsets(dim, index_type):
    def make(seed, offsets):
        return problem(
            BFLOAT16, batch=1, tokens=300, heads=2, value_heads=4, key_dim=dim, value_dim=dim,
            decay=True, cu_seqlens=offsets, seed=seed,
        )  # fmt: skip

    first = [0, 70, 199, 290]
    leaves, grads = leaves_and_gradients(make(0, first))
    cu_seqlens = torch.tensor(first, device=DEVICE, dtype=index_type)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward_and_backward(leaves, grads, cu_seqlens=cu_seqlens)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward_and_backward(leaves, grads, cu_seqlens=cu_seqlens)
    for seed, offsets in enumerate([[0, 0, 300, 300], [10, 11, 139, 203], first, [7, 7, 7, 7]], 1):
        new_leaves, new_grads = leaves_and_gradients(make(seed, offsets))
        with torch.no_grad():
            for name, t in leaves.items():
                t.copy_(new_leaves[name])
            for t, new in zip(grads, new_grads):
                t.copy_(new)
            cu_seqlens.copy_(torch.tensor(offsets))
        graph.replay()
        expected = forward_and_backward(
            new_leaves, new_grads, cu_seqlens=torch.tensor(offsets, device=DEVICE)
        )
        for i, (x, y) in enumerate(zip(captured, expected)):
            assert torch.equal(x, y), (seed, i)


@needs_gpu
def test_no_call_waits_for_the_device():
    offsets = [0, 70, 199, 290]
    case = problem(BFLOAT16, batch=1, tokens=300, key_dim=128, value_dim=128, cu_seqlens=offsets)
    leaves, grads = leaves_and_gradients(case)
    cu_seqlens = torch.tensor(offsets, device=DEVICE, dtype=torch.int32)
    forward_and_backward(leaves, grads, cu_seqlens=cu_seqlens)
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(200_000_000)  # about a tenth of a second
        busy.record()
        forward_and_backward(leaves, grads, cu_seqlens=cu_seqlens)
        assert not busy.query(), "the calls returned only after the device had caught up"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


@needs_gpu
@pytest.mark.parametrize("dim", [64, 128, 96])
def test_side_stream(dim):
    case = problem(BFLOAT16, tokens=150, key_dim=dim, value_dim=dim, decay=True)
    expected = evaluate(efla.chunk, case, BFLOAT16)
    leaves, grads = leaves_and_gradients(case)
    late = {n: torch.full_like(t, float("nan")).requires_grad_() for n, t in leaves.items()}
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # inputs arrive on this stream, late
        with torch.no_grad():
            for name, t in leaves.items():
                late[name].copy_(t)
        found = forward_and_backward(late, grads)
    side.synchronize()
    assert not same(dict(zip(expected, found)), expected)


@needs_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device only")
def test_second_device():
    case = problem(BFLOAT16, tokens=150, key_dim=128, value_dim=128, decay=True)
    expected = evaluate(efla.chunk, case, BFLOAT16, "cuda:0")
    with torch.cuda.device(0):
        found = evaluate(efla.chunk, case, BFLOAT16, "cuda:1")
    assert all(x.device.index == 1 for x in found.values())
    assert not same({n: x.to("cuda:0") for n, x in found.items()}, expected)


@pytest.mark.parametrize("packed", [False, True])
def test_compiles_whole(packed):
    torch._dynamo.reset()
    offsets = [0, 40, 90] if packed else None
    case = problem(
        BFLOAT16, batch=1, tokens=100, key_dim=64, value_dim=64, decay=True, cu_seqlens=offsets
    )
    leaves, grads = leaves_and_gradients(case)
    options = {} if offsets is None else {"cu_seqlens": torch.tensor(offsets, device=DEVICE)}
    expected = forward_and_backward(leaves, grads, **options)
    compiled = torch.compile(efla.chunk, fullgraph=True, backend="aot_eager")
    found = forward_and_backward(leaves, grads, compiled, **options)
    assert all(torch.equal(x, y) for x, y in zip(found, expected))


@needs_gpu
def test_autocast():
    layer = torch.nn.Linear(64, 64, device=DEVICE)
    case = on_device(problem(torch.float32, tokens=70, key_dim=64, value_dim=64), torch.float32)
    with torch.autocast("cuda", BFLOAT16):
        q, k, v = (layer(case[n]) for n in ("q", "k", "v"))
        o, final = efla.chunk(q, k, v, case["beta"], output_final_state=True)
    assert o.dtype == BFLOAT16 and final.dtype == torch.float32
    o.float().sum().backward()
    assert layer.weight.grad.isfinite().all()


# --- Sizes -----------------------------------------------------------------------------------------


@pytest.mark.huge
@pytest.mark.parametrize("dim", [64, 36])
def test_more_sequences_than_a_grid_dimension(dim):
    """More than 65,535 sequences of one or two tokens; a sample of them against the reference."""
    count = 70_000 if ON_GPU else 700
    sample = [0, 1, 65_534, 65_535, 65_536, count - 1] if ON_GPU else [0, 1, 350, count - 1]
    g = torch.Generator(DEVICE).manual_seed(2)
    lengths = 1 + torch.arange(count) % 2
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    tokens = int(cu_seqlens[-1])

    def normal(*shape, dtype=torch.float32):
        return torch.randn(*shape, device=DEVICE, generator=g).to(dtype)

    row = (1, tokens, 1, dim)
    leaves = {
        "q": normal(*row, dtype=BFLOAT16),
        "k": normal(*row, dtype=BFLOAT16) / dim**0.5,
        "v": normal(*row, dtype=BFLOAT16),
        "beta": normal(1, tokens, 1).sigmoid(),
        "initial_state": normal(count, 1, dim, dim),
    }
    leaves = {n: t.requires_grad_() for n, t in leaves.items()}
    grads = [normal(*row, dtype=BFLOAT16), normal(count, 1, dim, dim)]
    with poisoned_memory():
        found = forward_and_backward(leaves, grads, cu_seqlens=cu_seqlens.to(DEVICE))
    found = dict(zip(("o", "final_state", *leaves), found))

    rows = torch.cat([torch.arange(cu_seqlens[n], cu_seqlens[n + 1]) for n in sample])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths[sample].cumsum(0)])

    def pick(name, t):
        by_sequence = name in ("initial_state", "final_state", "grad_final_state")
        return (t[sample] if by_sequence else t[:, rows.to(t.device)]).detach().double().cpu()

    case = {n: pick(n, t) for n, t in leaves.items()}
    case |= {n: pick(n, t) for n, t in zip(("grad_o", "grad_final_state"), grads)}
    expected = expectation(case, cu_seqlens=offsets)
    found = {n: pick(n, t) for n, t in found.items()}
    assert not failures(found, expected, BFLOAT16, "many sequences", slack=2.0)


@needs_gpu
@pytest.mark.huge
def test_more_elements_than_an_int_counts():
    """2.15e9 elements in each of q, k, v, o and their gradients; the last sequence is checked."""
    tokens, heads, dim = 65_600, 256, 128
    assert tokens * heads * dim > 2**31
    free, _ = torch.cuda.mem_get_info()
    if free < 80 << 30:
        pytest.skip(f"{free >> 30} GiB of device memory are free, 80 are needed")
    g = torch.Generator(DEVICE).manual_seed(3)
    shape = (1, tokens, heads, dim)
    leaves = {n: torch.empty(shape, device=DEVICE, dtype=BFLOAT16) for n in ("q", "k", "v")}
    for t in leaves.values():
        t.normal_(generator=g)
    leaves["k"].mul_(dim**-0.5)
    leaves["beta"] = torch.rand(shape[:3], device=DEVICE, generator=g)
    grad = torch.empty(shape, device=DEVICE, dtype=BFLOAT16).normal_(generator=g)
    leaves = {n: t.requires_grad_() for n, t in leaves.items()}
    offsets = [*range(0, tokens - 4100, 4100), tokens - 100, tokens]
    with poisoned_memory():
        o, _ = efla.chunk(**leaves, cu_seqlens=torch.tensor(offsets, device=DEVICE))
        found = torch.autograd.grad(o, list(leaves.values()), grad)
    found = {"o": o.detach(), **dict(zip(leaves, found))}
    ends = torch.tensor([0, heads - 1], device=DEVICE)

    def pick(t):
        return t.detach()[:, -100:][:, :, ends].double().cpu()

    case = {n: pick(t) for n, t in leaves.items()}
    case |= {"grad_o": pick(grad), "grad_final_state": torch.zeros(1, 2, dim, dim).double()}
    expected = expectation({**case, "initial_state": None})
    bad = failures({n: pick(t) for n, t in found.items()}, expected, BFLOAT16, "2^31 elements")
    del found, leaves, grad, o
    torch.cuda.empty_cache()
    assert not bad, "\n".join(bad)


@needs_gpu
def test_offsets_beyond_an_int_in_strided_inputs():
    """Few tokens, whose stride takes the last ones beyond 2^31 elements."""
    case = problem(BFLOAT16, batch=1, tokens=130, heads=1, key_dim=128, value_dim=128)
    expected = evaluate(efla.chunk, case, BFLOAT16)
    stride = 2**31 // 100 // 64 * 64
    memory = torch.empty(130 * stride, device=DEVICE, dtype=BFLOAT16)

    def spread(x, first):
        y = memory.as_strided(x.shape, (0, stride, 128, 1), first)
        return y.copy_(x)

    tensors = on_device(case, BFLOAT16)
    for i, name in enumerate(("q", "k", "v", "grad_o")):
        tensors[name] = spread(tensors[name], 1024 * i)
    grads = [tensors.pop("grad_o"), tensors.pop("grad_final_state")]
    leaves = {n: t.requires_grad_() for n, t in tensors.items() if t is not None}
    found = dict(zip(expected, forward_and_backward(leaves, grads)))
    assert not same(found, expected)


@needs_gpu
def test_memory_grows_no_faster_than_the_tokens():
    peaks = []
    for tokens in (8192, 32768):
        leaves, grads = leaves_and_gradients(
            problem(BFLOAT16, batch=1, tokens=tokens, heads=1, key_dim=128, value_dim=128)
        )
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        forward_and_backward(leaves, grads)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 4.5 * peaks[0], peaks


@needs_gpu
def test_out_of_memory_leaves_the_device_usable():
    case = problem(BFLOAT16, batch=1, tokens=2048, heads=8, key_dim=128, value_dim=128)
    leaves, grads = leaves_and_gradients(case)
    expected = forward_and_backward(leaves, grads)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (1 << 20)) / total)
    try:
        # What earlier tests have left reserved is used up first, however much that is.
        calls = torch.cuda.memory_reserved() // (expected[0].numel() * expected[0].element_size())
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            for _ in range(calls + 2):
                expected.append(efla.chunk(**leaves)[0])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    found = forward_and_backward(leaves, grads)
    assert all(torch.equal(x, y) for x, y in zip(found, expected))


def test_float16_sums_that_leave_its_range_only_inside():
    """|k| = 1000: products of raw keys are beyond float16's largest number, the result is not."""

    def change(x):
        x["k"] = x["k"] / x["k"].norm(dim=-1, keepdim=True) * 1000
        x["q"] = x["q"] * 30

    for dim in (64, 128):
        case = problem(torch.float16, tokens=200, key_dim=dim, value_dim=dim, change=change)
        for op in (efla.chunk, efla.recurrent):
            check(op, case, torch.float16, where="float16, |k| = 1000", scale=dim**-0.5 / 30)
