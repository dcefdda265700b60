"""The operators on a GPU against the CPU's float64 on the same rounded inputs."""

import pytest
import torch

import efla

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

RULES = ["linear", "euler", "rk2", "rk4", "exact", "exact_log"]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-3, torch.float16: 3e-3}


def inputs(dtype, batch=2, tokens=150, heads=2, value_heads=4, key_dim=64, value_dim=64, decay=False,
           sequences=None):
    g = torch.Generator().manual_seed(3)
    q = torch.randn(batch, tokens, heads, key_dim, generator=g)
    k = torch.randn(batch, tokens, heads, key_dim, generator=g) / key_dim**0.5
    v = torch.randn(batch, tokens, value_heads, value_dim, generator=g)
    beta = torch.rand(batch, tokens, value_heads, generator=g)
    log_decay = -0.3 * torch.rand(batch, tokens, value_heads, generator=g) if decay else None
    state = torch.randn(sequences or batch, value_heads, key_dim, value_dim, generator=g)
    return [x.to(dtype) for x in (q, k, v)] + [beta, log_decay, state]


def run(op, tensors, **kwargs):
    """Outputs and gradients of a fixed random scalar of the outputs."""
    q, k, v, beta, log_decay, state = [
        None if x is None else x.detach().clone().requires_grad_() for x in tensors]
    o, final = op(q, k, v, beta, log_decay, initial_state=state, output_final_state=True, **kwargs)
    g = torch.Generator().manual_seed(5)
    weights = [torch.randn(x.shape, generator=g).to(x.device, x.dtype) for x in (o, final)]
    loss = sum((x.double() * w.double()).sum() for x, w in zip((o, final), weights))
    loss.backward()
    leaves = [x for x in (q, k, v, beta, log_decay, state) if x is not None]
    return [o, final] + [x.grad for x in leaves]


def assert_close(found, expected, tolerance):
    for i, (x, y) in enumerate(zip(found, expected, strict=True)):
        y = y.double()
        error = (x.double().cpu() - y).norm() / y.norm()
        assert error <= tolerance, f"output {i}: relative RMS {error:.2e}"


def on(device, tensors, dtype=None):
    return [None if x is None else x.to(device=device, dtype=dtype) for x in tensors]


@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("op", [efla.chunk, efla.recurrent])
def test_matches_cpu_float64(op, dtype, rule, decay):
    if decay and rule in ("rk2", "rk4"):
        return
    tensors = inputs(dtype, decay=decay)
    expected = run(op, on("cpu", tensors, torch.float64), rule=rule, qk_l2norm=True)
    assert_close(run(op, on("cuda", tensors), rule=rule, qk_l2norm=True), expected, TOLERANCE[dtype])


@pytest.mark.parametrize("index_type", [torch.int32, torch.int64])
def test_packed(index_type):
    tensors = inputs(torch.bfloat16, batch=1, tokens=300, sequences=5)
    offsets = torch.tensor([0, 0, 70, 199, 199, 290], dtype=index_type)
    expected = run(efla.chunk, on("cpu", tensors, torch.float64), cu_seqlens=offsets)
    found = run(efla.chunk, on("cuda", tensors), cu_seqlens=offsets.cuda())
    assert_close(found, expected, 6e-3)
    assert not found[0][:, 290:].any() and not found[2][:, 290:].any()


@pytest.mark.parametrize("tokens", [1, 5])
def test_step_in_place(tokens):
    q, k, v, beta, _, _ = inputs(torch.bfloat16, batch=3, tokens=tokens)
    pool = torch.randn(7, 4, 64, 64)
    expected, found = pool.clone(), pool.cuda()
    indices = torch.tensor([5, -1, 2])
    o_cpu = efla.step_(q.float(), k.float(), v.float(), beta, expected, state_indices=indices)
    o = efla.step_(q.cuda(), k.cuda(), v.cuda(), beta.cuda(), found, state_indices=indices.cuda())
    assert_close([o, found], [o_cpu, expected], 4e-3)
    assert torch.equal(found[[0, 1, 3, 4, 6]].cpu(), pool[[0, 1, 3, 4, 6]])


def test_strided_inputs_and_graph_capture():
    packed = torch.randn(2, 128, 4, 3 * 64, device="cuda", dtype=torch.bfloat16) / 8
    q, k, v = packed.split(64, dim=-1)
    beta = torch.rand(2, 128, 4, device="cuda")
    expected, _ = efla.chunk(q.contiguous(), k.contiguous(), v.contiguous(), beta)
    assert torch.equal(efla.chunk(q, k, v, beta)[0], expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = efla.chunk(q, k, v, beta)
    packed.neg_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, efla.chunk(q, k, v, beta)[0])


def test_compiles_whole():
    tensors = on("cuda", inputs(torch.bfloat16))
    compiled = torch.compile(efla.chunk, fullgraph=True, backend="aot_eager")
    assert_close(run(compiled, tensors), [x.cpu() for x in run(efla.chunk, tensors)], 1e-6)


def test_refuses_what_it_has_no_kernel_for():
    tensors = on("cuda", inputs(torch.float64))
    with pytest.raises(RuntimeError, match="float64 has no CUDA kernel"):
        efla.chunk(*tensors[:3], tensors[3].double())
