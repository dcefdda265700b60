"""efla.short_conv, efla.rms_norm and efla.swiglu on a GPU against the CPU's float64 on the same rounded
inputs; test_layer_ops.py holds the latter to float64 torch."""

import efla
import pytest
import torch
from cases import strided
from device_support import DEVICE, DTYPES, LIMITS, needs_device, needs_gpu, poisoned_memory, representable

pytestmark = needs_device


def draw(dtype, *shapes):
    """Tensors in float64 that dtype represents; None stays None."""
    g = torch.Generator().manual_seed(11)
    return [
        None if s is None else representable(torch.randn(*s, generator=g, dtype=torch.float64), dtype)
        for s in shapes
    ]


def evaluate(function, tensors, dtype, device, how=None):
    """Outputs and gradients of a fixed random scalar of them, as a list; None where there is none."""
    leaves = [
        None if t is None else t.detach().to(device, dtype).requires_grad_() for t in tensors
    ]
    with poisoned_memory():
        flat = [t is None or t.dim() < 2 for t in leaves]  # nothing to transpose
        outputs = function(*[t if f else strided(t, how) for t, f in zip(leaves, flat)])
        outputs = [o for o in outputs if o is not None]
        g = torch.Generator().manual_seed(5)
        grads = [
            representable(torch.randn(o.shape, generator=g, dtype=torch.float64), torch.bfloat16)
            for o in outputs
        ]
        grads = [x.to(o.device, o.dtype) for x, o in zip(grads, outputs)]
        given = [t for t in leaves if t is not None]
        return outputs + list(torch.autograd.grad(outputs, given, grads))


def check(function, shapes, dtype, how=None):
    tensors = draw(dtype, *shapes)
    expected = evaluate(function, tensors, torch.float64, "cpu")
    found = evaluate(function, tensors, dtype, DEVICE, how)
    for i, (x, y) in enumerate(zip(found, expected, strict=True)):
        assert x.shape == y.shape and x.dtype == dtype and x.device.type == DEVICE.type
        error = (x.double().cpu() - y).norm() / y.norm().clamp_min(1e-30)
        assert error <= LIMITS[dtype][1], f"tensor {i}: relative RMS {error:.2e}"  # NaN fails too


def conv(silu, offsets=None, final=True):
    def function(x, weight, state, bias):
        cu_seqlens = None if offsets is None else torch.as_tensor(offsets).to(x.device)
        return efla.short_conv(
            x, weight, silu=silu, initial_state=state, output_final_state=final,
            cu_seqlens=cu_seqlens, bias=bias,
        )

    return function


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 7, 64])
def test_short_conv(dtype, silu, with_state, with_bias, width):
    channels = 70
    shapes = [(2, 150, channels), (channels, width)]
    shapes += [(2, channels, width) if with_state else None, (channels,) if with_bias else None]
    check(conv(silu, final=with_state), shapes, dtype)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 15, 16, 17, 63, 64, 65, 129, 1000])
@pytest.mark.parametrize("channels", [1, 128, 257])
def test_short_conv_sizes(tokens, channels):
    shapes = [(1, tokens, channels), (channels, 4), (1, channels, 4), (channels,)]
    check(conv(True), shapes, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [3, 4])
@pytest.mark.parametrize(
    "offsets",
    [
        [0, 0, 70, 70, 199, 290, 290],
        [5, 6, 8, 8, 11, 80, 150],
        [3, 3],
        list(range(0, 60)) + [300],
        [0, 300],
    ],
)
def test_short_conv_packed(dtype, width, offsets):
    n = len(offsets) - 1
    shapes = [(1, 300, 33), (33, width), (n, 33, width), (33,)]
    check(conv(True, offsets), shapes, dtype)
    check(conv(True, torch.tensor(offsets, dtype=torch.int32)), shapes, dtype)


@needs_gpu
def test_short_conv_offsets_from_the_cpu_and_bad_ones():
    x, weight, state = (
        t.to(DEVICE, torch.float32) for t in draw(torch.float32, (1, 90, 8), (8, 4), (2, 8, 4))
    )
    run = lambda offsets: efla.short_conv(  # noqa: E731
        x, weight, initial_state=state, output_final_state=True, cu_seqlens=offsets
    )
    good = torch.tensor([0, 40, 90])
    assert all(torch.equal(a, b) for a, b in zip(run(good), run(good.to(DEVICE))))
    with pytest.raises(RuntimeError, match=r"cu_seqlens\[2\] = 91"):
        run(torch.tensor([0, 40, 91]))
    y, final = run(torch.tensor([0, 95, 90], device=DEVICE))
    with pytest.raises(RuntimeError, match=r"cu_seqlens\[1\] = 95"):
        efla.check_errors()
    assert not y.any() and torch.equal(final, state)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize("with_gate", [True, False])
@pytest.mark.parametrize(
    "shape", [(1, 2), (3, 7), (2, 65, 3, 64), (500, 128), (37, 1000), (5, 1030), (9, 4096), (3, 5001)]
)
def test_rms_norm(dtype, with_weight, with_gate, shape):
    shapes = [shape, shape[-1:] if with_weight else None, shape if with_gate else None]
    check(lambda x, weight, gate: [efla.rms_norm(x, weight, 1e-5, gate)], shapes, dtype)


def test_rms_norm_of_many_rows():
    shapes = [(40_000, 16), (16,), (40_000, 16)]
    check(lambda x, weight, gate: [efla.rms_norm(x, weight, 1e-5, gate)], shapes, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5, 37), (64, 128), (100_003,)])
def test_swiglu(dtype, shape):
    check(lambda gate, up: [efla.swiglu(gate, up)], [shape, shape], dtype)


@pytest.mark.parametrize(
    "how",
    [
        "transposed tokens",
        "last dimension not contiguous",
        "slice of a wider tensor",
        "odd first address",
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(how, dtype):
    check(conv(True), [(2, 40, 64), (64, 4), (2, 64, 4), (64,)], dtype, how)
    shape = (3, 40, 64)
    rms_norm = lambda x, weight, gate: [efla.rms_norm(x, weight, 1e-5, gate)]  # noqa: E731
    check(rms_norm, [shape, (64,), shape], dtype, how)
    check(lambda gate, up: [efla.swiglu(gate, up)], [shape, shape], dtype, how)


def test_extreme_gates_are_finite():
    z = torch.tensor([-1e4, -200.0, -89.0, 0.0, 89.0, 1e4], device=DEVICE, requires_grad=True)
    one = torch.ones_like(z)
    y = efla.swiglu(z, one)
    y.sum().backward()
    assert y.isfinite().all() and z.grad.isfinite().all()
    torch.testing.assert_close(y, torch.nn.functional.silu(z))


def test_float32_weights_of_bfloat16_inputs():
    x, weight, bias = draw(torch.bfloat16, (2, 90, 32), (32, 4), (32,))
    found = []
    for device, dtype in [(DEVICE, torch.bfloat16), ("cpu", torch.float64)]:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        a = x.to(device, dtype)
        w, b = (t.to(device, wide).requires_grad_() for t in (weight, bias))
        y = efla.rms_norm(efla.short_conv(a, w, bias=b)[0], b, 1e-6)
        y.double().sum().backward()
        assert w.grad.dtype == b.grad.dtype == wide
        found.append([y, w.grad, b.grad])
    for a, b in zip(*found):
        assert (a.double().cpu() - b).norm() <= 1e-2 * b.norm()


@needs_gpu
def test_the_same_bits_every_time_and_in_a_graph():
    x, weight, state, bias = (
        None if t is None else t.to(DEVICE, torch.bfloat16)
        for t in draw(torch.bfloat16, (1, 500, 256), (256, 4), (3, 256, 4), (256,))
    )
    offsets = torch.tensor([0, 100, 333, 500], device=DEVICE)
    ops, wanted = torch.ops.efla, [True] * 4

    def everything():
        y, final = ops._short_conv_forward(x, weight, True, state, True, offsets, bias)
        grads = ops._short_conv_backward(x, state, x, weight, True, state, offsets, bias, wanted)
        normed = ops._rms_norm_forward(x, bias, 1e-6, y)
        more = ops._rms_norm_backward(x, y, bias, 1e-6, x, wanted[:3])
        return [y, final, *grads, normed, *more, ops._swiglu_forward(x, y),
                *ops._swiglu_backward(y, x, normed, wanted[:2])]

    expected = everything()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(everything(), expected))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        everything()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = everything()
    x.neg_()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, everything()))


@needs_gpu
def test_float64_is_refused_by_name():
    x = torch.ones(1, 2, 3, device=DEVICE, dtype=torch.float64)
    for call in (
        lambda: efla.swiglu(x, x),
        lambda: efla.rms_norm(x),
        lambda: efla.short_conv(x, torch.ones(3, 4, device=DEVICE, dtype=torch.float64)),
    ):
        with pytest.raises(RuntimeError, match="float64 has no CUDA kernel"):
            call()


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0,)])
def test_empty(shape):
    x = torch.zeros(shape, device=DEVICE, requires_grad=True)
    weight = torch.ones(shape[-1], device=DEVICE, requires_grad=True)
    (efla.swiglu(x, x) + efla.rms_norm(x, weight, 1e-6, x)).sum().backward()
    assert x.grad.shape == shape and not weight.grad.any()
    y, final = efla.short_conv(
        torch.zeros(2, 0, 5, device=DEVICE), torch.ones(5, 4, device=DEVICE),
        initial_state=torch.ones(2, 5, 4, device=DEVICE), output_final_state=True,
    )
    assert y.shape == (2, 0, 5) and final.eq(1).all()
