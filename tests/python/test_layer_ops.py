"""efla.short_conv, efla.rms_norm, efla.swiglu against float64 torch."""

import efla
import pytest
import reference
import torch
from cases import TOLERANCE
from torch.nn.functional import silu

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def leaf(*shape, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_(True)


def twin(t):
    return None if t is None else t.detach().clone().requires_grad_(True)


def check_gradients(ours, theirs, tolerance):
    for a, b in zip(ours, theirs):
        if a is None:
            continue
        assert a.grad.dtype == a.dtype and a.grad.shape == a.shape
        assert reference.relative_error(a.grad, b.grad) < tolerance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("use_silu", [True, False])
@pytest.mark.parametrize("width", [1, 2, 4, 7])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_short_conv(dtype, use_silu, width, packed, with_state, with_bias):
    batch, tokens, channels = (1, 21, 10) if packed else (2, 11, 10)
    offsets = torch.tensor([1, 1, 3, 12, 20], dtype=torch.int32) if packed else None
    sequences = 4 if packed else batch
    x = leaf(batch, tokens, channels, dtype=dtype)
    weight = leaf(channels, width, dtype=dtype, seed=1)
    state = leaf(sequences, channels, width, dtype=dtype, seed=2) if with_state else None
    bias = leaf(channels, dtype=dtype, seed=3) if with_bias else None
    x_ref, weight_ref, state_ref, bias_ref = twin(x), twin(weight), twin(state), twin(bias)
    y, final = efla.short_conv(
        x, weight, silu=use_silu, initial_state=state, output_final_state=True, cu_seqlens=offsets,
        bias=bias,
    )
    y_ref, final_ref = reference.short_conv(
        x_ref, weight_ref, use_silu, state_ref, offsets, bias_ref
    )
    tolerance = TOLERANCE[dtype]
    assert y.dtype == dtype and reference.relative_error(y, y_ref) < tolerance
    assert torch.equal(final.double(), final_ref)
    grad_y, grad_final = torch.randn_like(y), torch.randn_like(final)
    torch.autograd.backward([y, final], [grad_y, grad_final])
    torch.autograd.backward([y_ref, final_ref], [grad_y.double(), grad_final.double()])
    theirs = [x_ref, weight_ref, state_ref, bias_ref]
    check_gradients([x, weight, state, bias], theirs, tolerance)


def test_short_conv_equals_conv1d():
    x, weight = leaf(2, 30, 5, dtype=torch.float64), leaf(5, 4, dtype=torch.float64, seed=1)
    padded = torch.nn.functional.pad(x.transpose(1, 2), (3, 0))
    for bias in (None, leaf(5, dtype=torch.float64, seed=2)):
        y, final = efla.short_conv(x, weight, silu=False, bias=bias)
        expected = torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=5)
        torch.testing.assert_close(y, expected.transpose(1, 2))
        assert final is None


def test_short_conv_split_equals_whole():
    x, weight = leaf(2, 30, 5, dtype=torch.float32), leaf(5, 4, dtype=torch.float32, seed=1)
    whole, final = efla.short_conv(x, weight, output_final_state=True)
    state, pieces = None, []
    for start, end in [(0, 1), (1, 3), (3, 3), (3, 30)]:
        y, state = efla.short_conv(
            x[:, start:end], weight, initial_state=state, output_final_state=True
        )
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 1), whole)
    assert torch.equal(state, final)


def test_short_conv_strides_and_empty():
    x, weight = leaf(2, 9, 6, dtype=torch.float32), leaf(6, 4, dtype=torch.float32, seed=1)
    y, _ = efla.short_conv(x, weight)
    for moved in (
        x.transpose(0, 1).contiguous().transpose(0, 1),
        x.transpose(1, 2).contiguous().transpose(1, 2),
        torch.cat([x, x], -1)[..., 6:],
    ):
        assert torch.equal(efla.short_conv(moved, weight)[0], y)
    state = leaf(2, 6, 4, dtype=torch.float32, seed=3)
    y, final = efla.short_conv(x[:, :0], weight, initial_state=state, output_final_state=True)
    assert y.shape == (2, 0, 6) and torch.equal(final, state)
    final.sum().backward()
    assert torch.equal(state.grad, torch.ones_like(state))
    assert efla.short_conv(x[:0], weight, output_final_state=True)[1].shape == (0, 6, 4)


def test_short_conv_rows_outside_the_sequences():
    offsets = torch.tensor([2, 5])
    x, weight = leaf(1, 8, 4, dtype=torch.float32), leaf(4, 3, dtype=torch.float32, seed=1)
    dirty = x.detach().clone()
    dirty[:, :2], dirty[:, 5:] = float("nan"), float("nan")
    dirty.requires_grad_(True)
    y, _ = efla.short_conv(dirty, weight, cu_seqlens=offsets)
    assert torch.equal(y, efla.short_conv(x, weight, cu_seqlens=offsets)[0])
    assert y[:, :2].abs().sum() == 0 and y[:, 5:].abs().sum() == 0
    y.sum().backward()
    assert dirty.grad[:, :2].abs().sum() == 0 and dirty.grad[:, 5:].abs().sum() == 0
    assert dirty.grad.isfinite().all() and weight.grad.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize("with_gate", [True, False])
@pytest.mark.parametrize("shape", [(3, 5, 2, 33), (7, 128), (9,)])
def test_rms_norm(dtype, with_weight, with_gate, shape):
    x = leaf(*shape, dtype=dtype)
    weight = leaf(shape[-1], dtype=dtype, seed=1) if with_weight else None
    gate = leaf(*shape, dtype=dtype, seed=2) if with_gate else None
    ours = [x, weight, gate]
    y = efla.rms_norm(x, weight, 1e-5, gate)
    theirs = [None if t is None else twin(t.double()) for t in ours]
    x_ref, weight_ref, gate_ref = theirs
    y_ref = x_ref * torch.rsqrt(x_ref.square().mean(-1, keepdim=True) + 1e-5)
    if with_weight:
        y_ref = y_ref * weight_ref
    if with_gate:
        y_ref = y_ref * silu(gate_ref)
    assert y.dtype == dtype and reference.relative_error(y, y_ref) < TOLERANCE[dtype]
    grad = torch.randn_like(y)
    y.backward(grad)
    y_ref.backward(grad.double())
    check_gradients(ours, theirs, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(dtype):
    gate, up = leaf(3, 5, 37, dtype=dtype), leaf(3, 5, 37, dtype=dtype, seed=1)
    gate_ref, up_ref = twin(gate.double()), twin(up.double())
    y, y_ref = efla.swiglu(gate, up), silu(gate_ref) * up_ref
    assert y.dtype == dtype and reference.relative_error(y, y_ref) < TOLERANCE[dtype]
    grad = torch.randn_like(y)
    y.backward(grad)
    y_ref.backward(grad.double())
    check_gradients([gate, up], [gate_ref, up_ref], TOLERANCE[dtype])


def test_strided_inputs_and_empty_inputs():
    x = leaf(6, 4, dtype=torch.float32)
    gate = leaf(4, 6, dtype=torch.float32, seed=1)
    assert torch.equal(efla.swiglu(x.T, gate), efla.swiglu(x.T.contiguous(), gate))
    normed = efla.rms_norm(x.T, None, 1e-6, gate)
    assert torch.equal(normed, efla.rms_norm(x.T.contiguous(), None, 1e-6, gate))
    for shape in [(0, 4), (3, 0), (0,)]:
        e = torch.zeros(shape, requires_grad=True)
        weight = torch.ones(shape[-1], requires_grad=True)
        y = efla.swiglu(e, e) + efla.rms_norm(e, weight, 1e-6, e)
        y.sum().backward()
        assert y.shape == shape and e.grad.shape == shape
        assert weight.grad.abs().sum() == 0


def test_float32_weights_of_bfloat16_inputs():
    x = leaf(2, 9, 6, dtype=torch.bfloat16)
    conv, norm = leaf(6, 4, dtype=torch.float32, seed=1), leaf(6, dtype=torch.float32, seed=2)
    with torch.autocast("cpu", torch.bfloat16):
        y = efla.rms_norm(efla.short_conv(x, conv)[0], norm, 1e-6)
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16 and conv.grad.dtype == norm.grad.dtype == torch.float32
    x_ref, conv_ref, norm_ref = twin(x.double()), twin(conv.double()), twin(norm.double())
    z, _ = reference.short_conv(x_ref, conv_ref, True)
    y_ref = torch.nn.functional.rms_norm(z, (6,), norm_ref, 1e-6)
    y_ref.square().sum().backward()
    assert reference.relative_error(y, y_ref) < 2e-2
    assert reference.relative_error(conv.grad, conv_ref.grad) < 4e-2
    assert reference.relative_error(norm.grad, norm_ref.grad) < 4e-2


def test_a_float32_weight_gets_its_gradient_unrounded():
    x = leaf(2, 40, 6, dtype=torch.bfloat16)
    conv = leaf(6, 4, dtype=torch.bfloat16, seed=1).detach().float().requires_grad_(True)
    norm = leaf(6, dtype=torch.bfloat16, seed=2).detach().float().requires_grad_(True)
    grad = leaf(2, 40, 6, dtype=torch.bfloat16, seed=3).detach()
    efla.short_conv(x, conv)[0].backward(grad)
    efla.rms_norm(x, norm, 1e-6).backward(grad)
    conv_ref, norm_ref = twin(conv.double()), twin(norm.double())
    reference.short_conv(x.detach().double(), conv_ref, True)[0].backward(grad.double())
    normed = torch.nn.functional.rms_norm(x.detach().double(), (6,), norm_ref, 1e-6)
    normed.backward(grad.double())
    assert reference.relative_error(conv.grad, conv_ref.grad) < 1e-5
    assert reference.relative_error(norm.grad, norm_ref.grad) < 1e-5


@pytest.mark.parametrize(
    "function,shapes",
    [
        (
            lambda x, weight, state: efla.short_conv(x, weight, initial_state=state)[0],
            [(2, 9, 6), (6, 4), (2, 6, 4)],
        ),
        (
            lambda x, w, state, bias: efla.short_conv(x, w, initial_state=state, bias=bias)[0],
            [(2, 9, 6), (6, 4), (2, 6, 4), (6,)],
        ),
        (lambda x, weight, gate: efla.rms_norm(x, weight, 1e-6, gate), [(5, 6), (6,), (5, 6)]),
        (lambda x, gate: efla.rms_norm(x, None, 1e-6, gate), [(5, 6), (5, 6)]),
        (efla.swiglu, [(5, 6), (5, 6)]),
    ],
)
def test_each_gradient_alone_equals_all_together(function, shapes):
    leaves = [leaf(*shape, dtype=torch.float32, seed=i) for i, shape in enumerate(shapes)]
    gradients = torch.autograd.grad(function(*leaves).square().sum(), leaves)
    for i, expected in enumerate(gradients):
        alone = [t if i == j else t.detach() for j, t in enumerate(leaves)]
        (gradient,) = torch.autograd.grad(function(*alone).square().sum(), leaves[i])
        assert torch.equal(gradient, expected)


def test_unwanted_gradients_are_not_computed():
    x, conv, norm = torch.randn(2, 9, 6), torch.randn(6, 4), torch.randn(6)
    state, ops = torch.randn(2, 6, 4), torch.ops.efla
    for wanted in ([False] * 3, [True, False, True], [False, True, False]):
        for gradients in (
            ops._short_conv_backward(x, None, x, conv, True, state, None, norm, wanted + [wanted[0]]),
            ops._rms_norm_backward(x, x, norm, 1e-6, x, wanted),
        ):
            assert [g.numel() > 0 for g in gradients[:3]] == wanted
            assert all((g.numel() > 0) == wanted[0] for g in gradients[3:])
    assert [g.numel() for g in ops._swiglu_backward(x, x, x, [True, False])] == [108, 0]


def test_forward_does_not_depend_on_the_number_of_threads():
    x, weight = leaf(3, 200, 64, dtype=torch.float32), leaf(64, 4, dtype=torch.float32, seed=1)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            y, final = efla.short_conv(x, weight, output_final_state=True)
            results.append((y, final, efla.rms_norm(x, weight[:, 0], 1e-6, x), efla.swiglu(x, x)))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0]))


X = torch.zeros


@pytest.mark.parametrize(
    "call,match",
    [
        (lambda: efla.short_conv(X(2, 3), X(3, 4)), r"x must have shape \[B, T, D\]"),
        (lambda: efla.short_conv(X(1, 2, 3), X(4, 4)), r"must have shape \[D, W\] with D = 3"),
        (lambda: efla.short_conv(X(1, 2, 3), X(3, 0)), r"W >= 1"),
        (lambda: efla.short_conv(X(1, 2, 3), X(3, 4).double()), "weight must be float32"),
        (lambda: efla.short_conv(X(1, 2, 3).int(), X(3, 4)), "x must be float32"),
        (
            lambda: efla.short_conv(X(1, 2, 3), X(3, 4), bias=X(4)),
            r"bias must have shape \[D\] = \[3\]",
        ),
        (
            lambda: efla.short_conv(X(1, 2, 3), X(3, 4), bias=X(3).double()),
            "bias must be float32 or have the dtype of x",
        ),
        (
            lambda: efla.short_conv(X(1, 2, 3), X(3, 4), initial_state=X(1, 3, 3)),
            r"initial_state must have shape \[N, D, W\] = \[1, 3, 4\]",
        ),
        (
            lambda: efla.short_conv(X(2, 2, 3), X(3, 4), cu_seqlens=torch.tensor([0, 2])),
            "batch must be 1",
        ),
        (
            lambda: efla.short_conv(X(1, 2, 3), X(3, 4), cu_seqlens=torch.tensor([0, 3])),
            r"cu_seqlens\[1\] = 3",
        ),
        (lambda: efla.rms_norm(X(2, 3), X(4)), r"weight must have shape \[D\] = \[3\]"),
        (lambda: efla.rms_norm(X(2, 3), X(3), -1.0), "eps must not be negative"),
        (lambda: efla.rms_norm(X(2, 3), X(3), 1e-6, X(3, 2)), "gate must have the shape"),
        (lambda: efla.rms_norm(X(2, 3, dtype=torch.int64)), "x must be float32"),
        (lambda: efla.swiglu(X(2, 3), X(3, 2)), "up must have the shape and dtype of gate"),
        (lambda: efla.swiglu(X(2, 3), X(2, 3).double()), "up must have the shape and dtype"),
        (lambda: efla.swiglu(X(2, 3), X(2, 3, device="meta")), "up is on meta"),
    ],
)
def test_bad_arguments_are_named(call, match):
    with pytest.raises(RuntimeError, match=match):
        call()


def test_second_derivatives_are_refused():
    x, weight = leaf(1, 3, 4, dtype=torch.float64), leaf(4, 2, dtype=torch.float64)
    for y in (efla.short_conv(x, weight)[0], efla.rms_norm(x, weight[:, 0]), efla.swiglu(x, x)):
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="second derivatives are not implemented"):
            grad.sum().backward()
