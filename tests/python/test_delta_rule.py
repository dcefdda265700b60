"""efla.chunk, efla.recurrent: values and gradients against a float64 recurrence; their promises."""

import efla
import pytest
import torch
from cases import RULES, RULES_AND_DECAY, TOLERANCE, differentiable, inputs, strided
from reference import delta_rule, relative_error

FORMS = [efla.chunk, efla.recurrent]
GRADIENTS = ("q", "k", "v", "beta", "log_decay", "initial_state")


def compare(op, tensors, tolerance, **options):
    """Compares outputs and every gradient of op with the reference."""
    ours, theirs = differentiable(tensors), differentiable(tensors)
    o, final = op(**ours, output_final_state=True, **options)
    o_ref, final_ref = delta_rule(**theirs, **options)
    assert o.dtype == tensors["q"].dtype
    assert relative_error(o, o_ref) < tolerance
    assert relative_error(final, final_ref) < tolerance
    weight_o, weight_final = torch.randn_like(o_ref), torch.randn_like(final_ref)
    torch.autograd.backward([o, final], [weight_o.to(o.dtype), weight_final.to(final.dtype)])
    weight_o = weight_o.to(o.dtype).double()
    ((o_ref * weight_o).sum() + (final_ref * weight_final).sum()).backward()
    for name in GRADIENTS:
        if ours[name] is None:
            continue
        grad, expected = ours[name].grad, theirs[name].grad
        assert grad.dtype == tensors[name].dtype and grad.shape == tensors[name].shape, name
        if expected.norm() == 0:
            assert grad.norm() == 0, name
        else:
            assert relative_error(grad, expected) < tolerance, name


@pytest.mark.parametrize("op", FORMS)
@pytest.mark.parametrize("rule,decay", RULES_AND_DECAY)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_and_gradients_of_every_rule(op, rule, decay, dtype):
    compare(op, inputs(tokens=37, dtype=dtype, decay=decay), TOLERANCE[dtype], rule=rule)


@pytest.mark.parametrize("op", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decay", [False, True])
def test_half_precision(op, dtype, decay):
    compare(op, inputs(tokens=70, dtype=dtype, decay=decay), TOLERANCE[dtype])


@pytest.mark.parametrize("op", FORMS)
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 130])
def test_lengths_around_the_chunk(op, tokens):
    compare(op, inputs(batch=1, tokens=tokens, dtype=torch.float64), 1e-10)


@pytest.mark.parametrize("op", FORMS)
@pytest.mark.parametrize("key_dim,value_dim", [(1, 1), (3, 17), (64, 5), (33, 64), (128, 128)])
def test_head_dimensions(op, key_dim, value_dim):
    case = inputs(
        batch=1, tokens=33, heads=1, key_dim=key_dim, value_dim=value_dim, dtype=torch.float64
    )
    compare(op, case, 1e-10)


@pytest.mark.parametrize("op", FORMS)
@pytest.mark.parametrize("rule", RULES)
def test_grouped_value_heads_scale_and_l2norm(op, rule):
    case = inputs(heads=2, value_heads=6, dtype=torch.float64)
    compare(op, case, 1e-10, rule=rule, scale=0.37, qk_l2norm=True)


@pytest.mark.parametrize("op", FORMS)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_packed_sequences(op, index_dtype):
    # An empty sequence first, in the middle and last, and rows before and past all sequences.
    offsets = torch.tensor([2, 2, 5, 70, 70, 150, 150], dtype=index_dtype)
    case = inputs(batch=1, tokens=160, sequences=6, decay=True, dtype=torch.float64)
    compare(op, case, 1e-10, cu_seqlens=offsets)


@pytest.mark.parametrize("op", FORMS)
def test_long_enough_for_several_saved_states(op):
    compare(op, inputs(batch=1, tokens=1100, heads=1, dtype=torch.float64), 1e-9)
    offsets = torch.tensor([0, 511, 512, 1100, 1100, 1640])
    case = inputs(batch=1, tokens=1700, heads=1, sequences=5, dtype=torch.float64)
    compare(op, case, 1e-9, cu_seqlens=offsets)


@pytest.mark.parametrize("op", FORMS)
def test_packed_equals_each_sequence_alone(op):
    offsets = [0, 5, 5, 41]
    case = inputs(batch=1, tokens=41, sequences=3)
    state = case.pop("initial_state")
    o, final = op(
        **case, initial_state=state, cu_seqlens=torch.tensor(offsets), output_final_state=True
    )
    for n, (start, end) in enumerate(zip(offsets[:-1], offsets[1:])):
        alone = {k: None if t is None else t[:, start:end] for k, t in case.items()}
        o_n, final_n = op(**alone, initial_state=state[n : n + 1], output_final_state=True)
        torch.testing.assert_close(o[:, start:end], o_n, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(final[n : n + 1], final_n, rtol=1e-5, atol=1e-6)


def test_rows_outside_the_sequences_are_zero_whatever_they_hold():
    offsets = torch.tensor([1, 9])
    clean = inputs(batch=1, tokens=14, sequences=1, decay=True)
    dirty = {k: t.clone() for k, t in clean.items()}
    for name in ("q", "k", "v", "beta", "log_decay"):
        dirty[name][:, :1] = float("nan")
        dirty[name][:, 9:] = float("nan")
    for op in FORMS:
        case = differentiable(dirty)
        o, final = op(**case, cu_seqlens=offsets, output_final_state=True)
        o_clean, final_clean = op(**clean, cu_seqlens=offsets, output_final_state=True)
        assert torch.equal(o, o_clean) and torch.equal(final, final_clean)
        assert o[:, :1].abs().sum() == 0 and o[:, 9:].abs().sum() == 0
        grad = torch.full_like(o, float("nan"))
        grad[:, 1:9] = 1
        o.backward(grad)
        for name in ("q", "k", "v", "beta", "log_decay"):
            g = case[name].grad
            assert g[:, :1].abs().sum() == 0 and g[:, 9:].abs().sum() == 0, name
            assert g.isfinite().all(), name
        assert case["initial_state"].grad.isfinite().all()


@pytest.mark.parametrize("op", FORMS)
def test_split_equals_whole(op):
    case = inputs(tokens=97, decay=True)
    state = case.pop("initial_state")
    o, final = op(**case, initial_state=state, output_final_state=True)
    pieces = []
    for start, end in [(0, 1), (1, 40), (40, 40), (40, 97)]:
        piece = {k: t[:, start:end] for k, t in case.items()}
        o_piece, state = op(**piece, initial_state=state, output_final_state=True)
        pieces.append(o_piece)
    torch.testing.assert_close(torch.cat(pieces, 1), o, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, final, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule,decay", RULES_AND_DECAY)
def test_chunk_recurrent_and_step_agree(rule, decay):
    case = inputs(tokens=21, heads=2, value_heads=4, decay=decay)
    o, final = efla.chunk(**case, rule=rule, output_final_state=True)
    o_rec, final_rec = efla.recurrent(**case, rule=rule, output_final_state=True)
    torch.testing.assert_close(o, o_rec, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(final, final_rec, rtol=1e-4, atol=1e-5)
    state = case.pop("initial_state").clone()
    steps = [
        efla.step_(
            **{k: None if x is None else x[:, t] for k, x in case.items()}, state=state, rule=rule
        )
        for t in range(21)
    ]
    torch.testing.assert_close(torch.stack(steps, 1), o, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, final, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", FORMS)
@pytest.mark.parametrize(
    "how",
    [
        "transposed tokens",
        "transposed heads",
        "last dimension not contiguous",
        "slice of a wider tensor",
        "odd first address",
    ],
)
def test_any_strides(op, how):
    case = inputs(decay=True)
    plain = differentiable(case)
    leaves = differentiable(case)
    moved = {k: strided(t, how) for k, t in leaves.items()}
    assert how == "odd first address" or not moved["q"].is_contiguous()
    o, final = op(**plain, output_final_state=True)
    o_moved, final_moved = op(**moved, output_final_state=True)
    assert torch.equal(o, o_moved) and torch.equal(final, final_moved)
    grad = strided(torch.randn_like(o), how)
    torch.autograd.backward([o, final], [grad, torch.ones_like(final)])
    torch.autograd.backward([o_moved, final_moved], [grad.contiguous(), torch.ones_like(final)])
    for name in GRADIENTS:
        torch.testing.assert_close(plain[name].grad, leaves[name].grad, rtol=0, atol=0)


def test_expanded_inputs_and_gradients():
    case = inputs(tokens=9)
    case["beta"] = torch.full((1, 1, 1), 0.5).expand(2, 9, 2)
    case["k"] = case["k"][:, :1].expand(-1, 9, -1, -1)
    plain = {k: None if t is None else t.contiguous() for k, t in case.items()}
    a, b = differentiable(case), differentiable(plain)
    efla.chunk(**a)[0].sum().backward()  # sum's gradient has stride 0 everywhere
    o = efla.chunk(**b)[0]
    o.backward(torch.ones_like(o))
    for name in ("q", "k", "v", "beta"):
        torch.testing.assert_close(a[name].grad, b[name].grad, rtol=0, atol=0)


@pytest.mark.parametrize("op", FORMS)
def test_forward_is_bitwise_the_same_for_any_number_of_threads(op):
    case = inputs(batch=3, tokens=150, heads=4, key_dim=32, value_dim=48, decay=True)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            results.append(op(**case, output_final_state=True))
    finally:
        torch.set_num_threads(before)
    for o, final in results[1:]:
        assert torch.equal(o, results[0][0]) and torch.equal(final, results[0][1])


def test_gradients_are_bitwise_repeatable():
    case = inputs(batch=2, tokens=150, heads=2, value_heads=4, key_dim=32, value_dim=48, decay=True)
    runs = []
    for _ in range(3):
        leaves = differentiable(case)
        efla.chunk(**leaves)[0].square().sum().backward()
        runs.append([leaves[n].grad for n in GRADIENTS])
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0]))


@pytest.mark.parametrize("op", FORMS)
def test_a_row_does_not_depend_on_its_neighbours(op):
    case = inputs(batch=3, tokens=70, decay=True)
    o, final = op(**case, output_final_state=True)
    alone = {k: t[1:2] for k, t in case.items()}
    o_alone, final_alone = op(**alone, output_final_state=True)
    assert torch.equal(o[1:2], o_alone) and torch.equal(final[1:2], final_alone)
    poisoned = {k: t.clone() for k, t in case.items()}
    for t in poisoned.values():
        t[0] = float("nan")
    o_poisoned, _ = op(**poisoned)
    assert torch.equal(o[1:], o_poisoned[1:])


@pytest.mark.parametrize("op", FORMS)
@pytest.mark.parametrize("batch,tokens", [(2, 0), (0, 5), (0, 0)])
def test_empty_inputs_pass_the_state_through(op, batch, tokens):
    case = differentiable(inputs(batch=batch, tokens=tokens, decay=True))
    o, final = op(**case, output_final_state=True)
    assert o.shape == (batch, tokens, 2, 6) and final.shape == (batch, 2, 8, 6)
    assert torch.equal(final, case["initial_state"])
    assert final.data_ptr() != case["initial_state"].data_ptr() or final.numel() == 0
    weight = torch.randn_like(final)
    torch.autograd.backward([o, final], [torch.ones_like(o), weight])
    assert torch.equal(case["initial_state"].grad, weight)
    assert case["q"].grad.shape == case["q"].shape


@pytest.mark.parametrize("op", FORMS)
def test_no_sequences_at_all(op):
    case = inputs(batch=1, tokens=4, sequences=0)
    o, final = op(**case, cu_seqlens=torch.tensor([0]), output_final_state=True)
    assert o.abs().sum() == 0 and o.shape == (1, 4, 2, 6) and final.shape == (0, 2, 8, 6)


@pytest.mark.parametrize("op", FORMS)
def test_only_empty_sequences(op):
    case = inputs(batch=1, tokens=4, sequences=2)
    o, final = op(**case, cu_seqlens=torch.tensor([2, 2, 2]), output_final_state=True)
    assert o.abs().sum() == 0 and torch.equal(final, case["initial_state"])


@pytest.mark.parametrize("op", FORMS)
def test_final_state_is_none_unless_asked_for(op):
    case = differentiable(inputs())
    o, final = op(**case)
    assert final is None
    with torch.no_grad():
        assert op(**case)[1] is None
    o, final = op(**case, output_final_state=True)
    final.sum().backward()  # o unused
    assert case["q"].grad.abs().sum() == 0 and case["k"].grad.abs().sum() > 0


def test_beta_and_decay_in_the_dtype_of_q():
    case = inputs(dtype=torch.bfloat16, decay=True)
    case["beta"], case["log_decay"] = case["beta"].bfloat16(), case["log_decay"].bfloat16()
    compare(efla.chunk, case, TOLERANCE[torch.bfloat16])
    case = inputs(dtype=torch.float64, decay=True)
    case["beta"], case["log_decay"] = case["beta"].float(), case["log_decay"].float()
    compare(efla.chunk, case, 1e-6)


@pytest.mark.parametrize("op", FORMS)
def test_extreme_steps_stay_finite(op):
    for beta, key in [(0.0, 1.0), (1.0, 0.0), (1e3, 30.0), (1e6, 1.0)]:
        case = inputs(tokens=70)
        case["beta"] = torch.full_like(case["beta"], beta)
        case["k"] = case["k"] * key
        leaves = differentiable(case)
        o, final = op(**leaves, output_final_state=True)
        (o.sum() + final.sum()).backward()
        assert o.isfinite().all() and final.isfinite().all()
        for name in ("q", "k", "v", "beta", "initial_state"):
            assert leaves[name].grad.isfinite().all(), (name, beta, key)


def test_autocast_takes_bfloat16_values_with_float32_steps():
    case = inputs()
    layer = torch.nn.Linear(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        q, k = layer(case["q"]), layer(case["k"])
        v = torch.nn.functional.linear(case["v"], torch.eye(6))
        assert q.dtype == v.dtype == torch.bfloat16
        o, final = efla.chunk(q, k, v, case["beta"], output_final_state=True)
    assert o.dtype == torch.bfloat16 and final.dtype == torch.float32
    o.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32 and layer.weight.grad.isfinite().all()


def test_partial_gradients():
    case = inputs(decay=True)
    full = differentiable(case)
    efla.chunk(**full)[0].square().sum().backward()
    for name in GRADIENTS:
        leaves = {k: t.clone() for k, t in case.items()}
        leaves[name].requires_grad_(True)
        efla.chunk(**leaves)[0].square().sum().backward()
        torch.testing.assert_close(leaves[name].grad, full[name].grad, rtol=0, atol=0)
    everything = differentiable(case)
    (only,) = torch.autograd.grad(
        efla.chunk(**everything)[0].square().sum(), everything["initial_state"]
    )
    torch.testing.assert_close(only, full["initial_state"].grad, rtol=0, atol=0)


@pytest.mark.parametrize("op", FORMS)
def test_second_derivative_is_refused(op):
    case = differentiable(inputs())
    o, _ = op(**case)
    (grad,) = torch.autograd.grad(o.square().sum(), case["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives are not implemented"):
        grad.sum().backward()


def test_changing_a_saved_input_in_place_is_noticed():
    case = differentiable(inputs())
    k = case["k"] * 1
    o, _ = efla.chunk(case["q"], k, case["v"], case["beta"])
    k.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_fla_signatures():
    case = inputs(decay=True, sequences=1, batch=1)
    q, k, v, beta, g = (case[n] for n in ("q", "k", "v", "beta", "log_decay"))
    state = case["initial_state"]
    options = {"scale": 0.3, "initial_state": state, "output_final_state": True}
    o, final = efla.chunk_delta_rule(
        q, k, v, beta, 0.3, state, True, use_qk_l2norm_in_kernel=True
    )
    o_ref, final_ref = efla.chunk(q, k, v, beta, rule="euler", qk_l2norm=True, **options)
    assert torch.equal(o, o_ref) and torch.equal(final, final_ref)
    o, final = efla.chunk_gated_delta_rule(q, k, v, g, beta, 0.3, state, True)
    o_ref, final_ref = efla.chunk(q, k, v, beta, g, rule="euler", **options)
    assert torch.equal(o, o_ref) and torch.equal(final, final_ref)
    o, _ = efla.chunk_delta_rule(q, k, v, beta, cu_seqlens=torch.tensor([0, 19]), rule="exact")
    assert torch.equal(o, efla.chunk(q, k, v, beta, cu_seqlens=torch.tensor([0, 19]))[0])
    with pytest.raises(ValueError, match="head_first"):
        efla.chunk_delta_rule(q, k, v, beta, head_first=True)
    with pytest.raises(ValueError, match="use_gate_in_kernel"):
        efla.chunk_gated_delta_rule(q, k, v, g, beta, use_gate_in_kernel=True)
