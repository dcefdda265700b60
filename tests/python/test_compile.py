"""What torch's tools expect of an operator: opcheck, gradcheck, meta tensors, torch.compile."""

import efla
import pytest
import torch
import torch._dynamo.testing
from cases import RULES_AND_DECAY, differentiable, inputs
from functorch.compile import aot_function, make_boxed_func
from torch.library import opcheck

E = torch.ops.efla


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype).requires_grad_(True)


def delta_rule_samples():
    """(args, kwargs) of chunk and recurrent."""
    for decay in (False, True):
        for packed in (False, True):
            case = inputs(
                batch=1 if packed else 2,
                tokens=12,
                value_heads=4,
                decay=decay,
                sequences=3 if packed else None,
            )
            case = differentiable(case)
            state = case.pop("initial_state")
            options = dict(
                initial_state=state if decay else None,
                output_final_state=packed or decay,
                cu_seqlens=torch.tensor([0, 5, 5, 11]) if packed else None,
                qk_l2norm=packed,
                rule="exact" if packed else "euler",
                recompute=packed != decay,
            )
            yield tuple(case.values()), options


@pytest.mark.parametrize("name", ["chunk", "recurrent"])
@pytest.mark.parametrize("sample", range(4))
def test_opcheck_of_the_delta_rule(name, sample):
    args, options = list(delta_rule_samples())[sample]
    opcheck(getattr(E, name).default, args, options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_of_the_internal_pair(dtype):
    case = inputs(batch=1, tokens=9, decay=True, sequences=2, dtype=dtype)
    offsets = torch.tensor([0, 4, 8])
    forward = (
        *(case[n] for n in ("q", "k", "v", "beta", "log_decay", "initial_state")),
        offsets,
        "exact",
        None,
        True,
        True,
        False,
        True,
    )
    opcheck(E._delta_rule_forward.default, forward)
    o, final, states = E._delta_rule_forward(*forward)
    assert states.shape == (3, 2, 8, 6)
    backward = (o, final, *forward[:7], states, "exact", None, True, False, [True] * 6)
    opcheck(E._delta_rule_backward.default, backward)
    without = (o, None, *forward[:7], states, "exact", None, True, False, [False, True] * 3)
    opcheck(E._delta_rule_backward.default, without)
    no_states = torch.empty(0)
    without = (o, None, *forward[:7], no_states, "exact", None, True, True, [True] * 6)
    opcheck(E._delta_rule_backward.default, without)


@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pool", [False, True])
def test_opcheck_of_step(pool, storage):
    case = inputs(tokens=1, decay=True, sequences=3 if pool else None)
    state = case.pop("initial_state").to(storage)
    token = [t[:, 0] for t in case.values()]
    args = (*token[:4], state, token[4])
    opcheck(E.step_.default, args, {"state_indices": torch.tensor([2, -1]) if pool else None})


def test_opcheck_of_the_layer_operators():
    x, weight, state = leaf(2, 9, 6), leaf(6, 4), leaf(2, 6, 4)
    opcheck(E.short_conv.default, (x, weight), {})
    opcheck(
        E.short_conv.default, (x, weight), dict(initial_state=state, output_final_state=True)
    )
    packed = leaf(1, 9, 6)
    options = dict(initial_state=state, cu_seqlens=torch.tensor([0, 3, 9], dtype=torch.int32))
    opcheck(E.short_conv.default, (packed, weight), options)
    opcheck(E.short_conv.default, (packed, weight), dict(options, bias=leaf(6)))
    norm, gate = leaf(6), leaf(2, 9, 6)
    opcheck(E.rms_norm.default, (x, None, 1e-6))
    opcheck(E.rms_norm.default, (x, norm, 1e-6, gate))
    opcheck(E.swiglu.default, (x, gate))
    x, weight, state, norm, gate = (t.detach() for t in (x, weight, state, norm, gate))
    opcheck(E._short_conv_forward.default, (x, weight, True, state, True, None, norm))
    for wanted in ([True] * 3, [True, False, False], [False, True, False], [False, False, True]):
        args = (x, state, x, weight, True, state, None, norm, wanted + [wanted[1]])
        opcheck(E._short_conv_backward.default, args)
        opcheck(E._rms_norm_backward.default, (x, x, norm, 1e-6, gate, wanted))
    args = (x, None, x, weight, False, None, None, None, [True, True, False, True])
    opcheck(E._short_conv_backward.default, args)
    opcheck(E._rms_norm_forward.default, (x, norm, 1e-6, gate))
    opcheck(E._rms_norm_backward.default, (x, x, None, 1e-6, None, [True, False, False]))
    opcheck(E._swiglu_forward.default, (x, gate))
    for wanted in ([True, True], [True, False], [False, True]):
        opcheck(E._swiglu_backward.default, (x, x, gate, wanted))


@pytest.mark.parametrize("op", [efla.chunk, efla.recurrent])
@pytest.mark.parametrize("rule,decay", RULES_AND_DECAY)
@pytest.mark.parametrize("variant", ["dense", "grouped l2norm", "packed"])
def test_gradcheck(op, rule, decay, variant):
    packed = variant == "packed"
    grouped = variant == "grouped l2norm"
    case = differentiable(
        inputs(
            batch=1,
            tokens=6,
            heads=1,
            value_heads=2 if grouped else 1,
            key_dim=3,
            value_dim=2,
            dtype=torch.float64,
            decay=decay,
            sequences=3 if packed else None,
        )
    )
    names = [n for n, t in case.items() if t is not None]

    def function(*tensors):
        return op(
            **dict(zip(names, tensors)),
            rule=rule,
            output_final_state=True,
            cu_seqlens=torch.tensor([1, 3, 3, 5]) if packed else None,
            qk_l2norm=grouped,
        )

    assert torch.autograd.gradcheck(function, [case[n] for n in names])


def test_gradcheck_of_the_layer_operators():
    d = torch.float64
    x, weight, state = leaf(1, 7, 3, dtype=d), leaf(3, 4, dtype=d), leaf(2, 3, 4, dtype=d)
    offsets = torch.tensor([0, 2, 6])

    def conv(x, weight, state, bias=None):
        return E.short_conv(
            x, weight, initial_state=state, output_final_state=True, cu_seqlens=offsets, bias=bias
        )

    assert torch.autograd.gradcheck(conv, (x, weight, state))
    assert torch.autograd.gradcheck(conv, (x, weight, state, leaf(3, dtype=d)))
    norm, gate = leaf(3, dtype=d), leaf(1, 7, 3, dtype=d)
    def normed(x, norm, gate):
        return efla.rms_norm(x, norm, 1e-3, gate)

    assert torch.autograd.gradcheck(normed, (x, norm, gate))
    assert torch.autograd.gradcheck(efla.swiglu, (x, gate))


def test_meta_tensors():
    case = {
        k: None if t is None else t.to("meta") for k, t in inputs(value_heads=4, decay=True).items()
    }
    for op in (efla.chunk, efla.recurrent):
        leaves = differentiable(case)
        o, final = op(**leaves, output_final_state=True)
        assert o.is_meta and o.shape == (2, 19, 4, 6) and final.shape == (2, 4, 8, 6)
        (o.sum() + final.sum()).backward()
        for leaf_tensor in leaves.values():
            assert leaf_tensor.grad.is_meta and leaf_tensor.grad.shape == leaf_tensor.shape
    state = case.pop("initial_state")
    token = {k: t[:, 0] for k, t in case.items()}
    assert efla.step_(**token, state=state).shape == (2, 4, 6)
    with pytest.raises(RuntimeError, match="beta must have shape"):
        efla.chunk(case["q"], case["k"], case["v"], case["beta"][:, :3])


def block(q, k, v, beta, log_decay, initial_state, conv, norm):
    """Every differentiable operator in one graph."""
    batch, tokens, heads, dim = v.shape
    v, _ = efla.short_conv(v.reshape(batch, tokens, heads * dim), conv)
    v = v.view(batch, tokens, heads, dim)
    o, final = efla.chunk(
        q, k, v, beta, log_decay, initial_state=initial_state, output_final_state=True
    )
    o2, _ = efla.recurrent(q, k, v, beta, rule="euler", qk_l2norm=True)
    y = efla.swiglu(efla.rms_norm(o, norm, 1e-6, o2), v)
    return y, final


def block_inputs(tokens=13, seed=0):
    case = inputs(tokens=tokens, value_heads=2, decay=True, seed=seed)
    torch.manual_seed(seed)
    case["conv"], case["norm"] = torch.randn(12, 4), torch.randn(6)
    return differentiable(case)


@pytest.mark.parametrize(
    "backend,dynamic", [("aot_eager", False), ("aot_eager", True), ("inductor", False)]
)
def test_compile_forward_and_backward(backend, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend=backend, dynamic=dynamic)
    for tokens in (13, 13, 30) if dynamic else (13,):
        ours, theirs = block_inputs(tokens), block_inputs(tokens)
        y, final = compiled(**ours)
        y_ref, final_ref = block(**theirs)
        torch.testing.assert_close(y, y_ref)
        torch.testing.assert_close(final, final_ref)
        (y.square().sum() + final.sum()).backward()
        (y_ref.square().sum() + final_ref.sum()).backward()
        for name in ours:
            torch.testing.assert_close(ours[name].grad, theirs[name].grad)


def test_dynamic_shapes_do_not_recompile():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, backend=counter, dynamic=True)
    for tokens in (13, 30, 700):
        compiled(**block_inputs(tokens))
    assert counter.frame_count == 1


def test_compile_packed():
    torch._dynamo.reset()

    def function(case, offsets):
        return efla.chunk(**case, cu_seqlens=offsets, output_final_state=True)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    offsets = torch.tensor([0, 4, 4, 17])
    ours = differentiable(inputs(batch=1, sequences=3))
    theirs = differentiable(inputs(batch=1, sequences=3))
    for case, f in ((ours, compiled), (theirs, function)):
        o, final = f(case, offsets)
        (o.square().sum() + final.square().sum()).backward()
    for name in ours:
        if ours[name] is not None:
            torch.testing.assert_close(ours[name].grad, theirs[name].grad)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_step_updates_the_state_in_place(backend):
    torch._dynamo.reset()
    case = inputs(tokens=1)
    state = case.pop("initial_state")
    token = {k: None if t is None else t[:, 0] for k, t in case.items()}
    expected = state.clone()

    def decode(token, state):
        o = efla.step_(**token, state=state)
        return o + efla.step_(**token, state=state)

    with torch.no_grad():
        o_ref = decode(token, expected)
        where = state.data_ptr()
        o = torch.compile(decode, fullgraph=True, backend=backend)(token, state)
    assert state.data_ptr() == where
    torch.testing.assert_close(o, o_ref)
    torch.testing.assert_close(state, expected)


def test_the_graph_holds_the_internal_operators_only():
    graphs = []

    def compiler(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    case = differentiable(inputs(tokens=5))
    function = aot_function(lambda *t: efla.chunk(*t)[0], compiler, compiler)
    function(case["q"], case["k"], case["v"], case["beta"]).sum().backward()
    calls = [str(n.target) for g in graphs for n in g.graph.nodes if n.op == "call_function"]
    assert sum("_delta_rule_forward" in c for c in calls) == 1
    assert sum("_delta_rule_backward" in c for c in calls) == 1
