"""efla.step_: in place or not at all."""

import efla
import pytest
import torch
from cases import RULES_AND_DECAY, TOLERANCE, inputs
from reference import delta_rule, relative_error


def one_token(case):
    """The first token without its axis; the state apart."""
    state = case["initial_state"].clone()
    token = {
        k: None if t is None else t[:, 0] for k, t in case.items() if k != "initial_state"
    }
    return token, state


@pytest.mark.parametrize("rule,decay", RULES_AND_DECAY)
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16]
)
@pytest.mark.parametrize("qk_l2norm", [False, True])
def test_matches_the_reference(rule, decay, dtype, qk_l2norm):
    case = inputs(tokens=1, heads=2, value_heads=4, dtype=dtype, decay=decay)
    o_ref, final_ref = delta_rule(**case, rule=rule, qk_l2norm=qk_l2norm)
    token, state = one_token(case)
    o = efla.step_(**token, state=state, rule=rule, qk_l2norm=qk_l2norm)
    assert o.dtype == dtype and o.shape == token["v"].shape
    assert relative_error(o, o_ref[:, 0]) < TOLERANCE[dtype]
    assert relative_error(state, final_ref) < TOLERANCE[dtype]


@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_several_tokens(tokens):
    case = inputs(batch=3, tokens=tokens, decay=True)
    o_ref, final_ref = delta_rule(**case, scale=0.5)
    state = case.pop("initial_state")
    o = efla.step_(**case, state=state, scale=0.5)
    assert o.shape == case["v"].shape
    assert relative_error(o, o_ref) < 2e-5 and relative_error(state, final_ref) < 2e-5


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_pool_of_states(dtype):
    case = inputs(batch=4, tokens=1, sequences=7)
    token, pool = one_token(case)
    before = pool.clone()
    rows = [5, -1, 0, 3]
    indices = torch.tensor([r for row in rows for r in (row, 99)], dtype=dtype)[::2]  # strided
    o = efla.step_(**token, state=pool, state_indices=indices)
    assert o[1].abs().sum() == 0
    for b, row in enumerate(rows):
        if row == -1:
            continue
        one = {k: None if t is None else t[b : b + 1] for k, t in token.items()}
        state = before[row : row + 1].clone()
        torch.testing.assert_close(o[b : b + 1], efla.step_(**one, state=state), rtol=0, atol=0)
        assert torch.equal(pool[row], state[0])
    untouched = [1, 2, 4, 6]
    assert torch.equal(pool[untouched], before[untouched])


def test_padding_rows_may_hold_anything():
    case = inputs(batch=3, tokens=1, sequences=2)
    token, pool = one_token(case)
    for t in token.values():
        if t is not None:
            t[1] = float("nan")
    o = efla.step_(**token, state=pool, state_indices=torch.tensor([1, -1, 0]))
    assert o[1].abs().sum() == 0 and o.isfinite().all() and pool.isfinite().all()
    before = pool.clone()
    o = efla.step_(**token, state=pool, state_indices=torch.tensor([-1, -1, -1]))
    assert o.abs().sum() == 0 and torch.equal(pool, before)


@pytest.mark.parametrize("axes", [(0, 1), (1, 2), (2, 3)])
def test_state_with_other_strides_is_updated_in_place(axes):
    token, expected = one_token(inputs(tokens=1))
    storage = expected.transpose(*axes).contiguous()
    state = storage.transpose(*axes)
    assert not state.is_contiguous()
    o_ref = efla.step_(**token, state=expected)
    o = efla.step_(**token, state=state)
    assert torch.equal(o, o_ref) and torch.equal(storage.transpose(*axes), expected)


def test_a_layer_of_a_larger_pool_is_updated_in_place():
    token, expected = one_token(inputs(tokens=1))
    pool = torch.stack([expected + 1, expected, expected - 1], 1)  # [P, layers, HV, K, V]
    others = pool[:, [0, 2]].clone()
    efla.step_(**token, state=expected)
    efla.step_(**token, state=pool[:, 1])
    assert torch.equal(pool[:, 1], expected) and torch.equal(pool[:, [0, 2]], others)


@pytest.mark.parametrize("name", ["q", "v", "beta"])
def test_any_strides(name):
    token, state = one_token(inputs(tokens=1))
    state_moved = state.clone()
    moved = dict(token)
    moved[name] = torch.stack([token[name], torch.full_like(token[name], float("nan"))], -1)[..., 0]
    o = efla.step_(**token, state=state)
    assert torch.equal(o, efla.step_(**moved, state=state_moved))
    assert torch.equal(state, state_moved)


def test_empty_batches():
    case = inputs(batch=0, tokens=1, sequences=3)
    token, pool = one_token(case)
    before = pool.clone()
    none = torch.zeros(0, dtype=torch.int64)
    assert efla.step_(**token, state=pool, state_indices=none).shape == (0, 2, 6)
    assert torch.equal(pool, before)
    assert efla.step_(**token, state=pool[:0]).shape == (0, 2, 6)
    case = inputs(batch=3, tokens=0)
    state = case.pop("initial_state")
    before = state.clone()
    assert efla.step_(**case, state=state).shape == (3, 0, 2, 6)
    assert torch.equal(state, before)


def refused(match, token, state, **options):
    before = state.clone()
    with pytest.raises(RuntimeError, match=match):
        efla.step_(**token, state=state, **options)
    assert torch.equal(state, before)


@pytest.mark.parametrize(
    "indices,match",
    [
        ([0, 5], r"state_indices\[1\] = 5 is outside the pool of P = 3"),
        ([-2, 1], r"state_indices\[0\] = -2 is outside"),
        ([1, 1], "names state 1 more than once"),
    ],
)
def test_bad_indices_leave_the_state_alone(indices, match):
    token, pool = one_token(inputs(batch=2, tokens=1, sequences=3))
    refused(match, token, pool, state_indices=torch.tensor(indices))


def test_refused_calls_leave_the_state_alone():
    token, state = one_token(inputs(tokens=1))
    refused("state must have shape", token, state[:1])
    refused("state must be Float", token, state.double())
    refused("state must be Float, BFloat16 or Half", token, state.int())
    refused("unknown rule", token, state, rule="midpoint")
    refused("state_indices must be int32 or int64", token, state, state_indices=torch.ones(2))
    refused(
        r"state_indices must have shape \[B\]", token, state, state_indices=torch.tensor([0])
    )
    refused("k must have the shape of q", {**token, "k": token["k"][:, :1]}, state)
    refused("v must have the dtype of q", {**token, "v": token["v"].double()}, state)
    refused("beta must have shape", {**token, "beta": token["beta"][:1]}, state)
    refused("scale must be finite", token, state, scale=float("nan"))
    refused("scale must be finite", token, state, scale=1e39)  # infinite in float32
    long = inputs(tokens=9)
    refused("at most 8 tokens", {k: t for k, t in long.items() if k != "initial_state"}, state)


@pytest.mark.parametrize(
    "strides", [(96, 47, 6, 1), (50, 48, 6, 1), (96, 48, 6, 0), (96, 1, 6, 1)]
)
def test_a_state_with_overlapping_strides_is_refused(strides):
    token, _ = one_token(inputs(tokens=1))
    state = torch.zeros(400).as_strided((2, 2, 8, 6), strides)
    refused("share memory", token, state)


@pytest.mark.parametrize(
    "strides", [(97, 48, 6, 1), (120, 60, 7, 1), (2, 200, 24, 4), (1, 96, 2, 16)]
)
def test_a_state_with_gaps_or_permuted_axes_is_updated(strides):
    token, expected = one_token(inputs(tokens=1))
    state = torch.full((500,), 7.0).as_strided((2, 2, 8, 6), strides)
    state.copy_(expected)
    untouched = (state._base == 7).sum()
    efla.step_(**token, state=expected)
    efla.step_(**token, state=state)
    assert torch.equal(state, expected)
    assert (state._base == 7).sum() == untouched == 500 - 192


def test_an_inference_state_outside_inference_mode_is_refused():
    token, state = one_token(inputs(tokens=1))
    with torch.inference_mode():
        inference = {k: None if t is None else t.clone() for k, t in token.items()}
        made_there = state.clone()
    for arguments in (token, inference):
        refused("state was made under torch.inference_mode", arguments, made_there)
    efla.step_(**token, state=state)
    with torch.inference_mode():
        efla.step_(**token, state=made_there)
    assert torch.equal(made_there, state)


def test_shared_memory_is_refused():
    token, state = one_token(inputs(tokens=1))
    expanded = torch.zeros(1, 2, 8, 6).expand(2, 2, 8, 6)
    refused("share memory", token, expanded)
    q = state.view(-1)[: 2 * 2 * 8].view(2, 2, 8)
    refused("q shares memory with state", {**token, "q": q}, state)


def test_gradients_are_refused_and_not_silently_dropped():
    token, state = one_token(inputs(tokens=1))
    for name in ("q", "k", "v", "beta"):
        leaf = {**token, name: token[name].clone().requires_grad_(True)}
        refused(f"has no gradient, but {name} requires one", leaf, state)
        with torch.no_grad():
            efla.step_(**leaf, state=state.clone())
    leaf_state = state.clone().requires_grad_(True)
    with pytest.raises(RuntimeError, match="has no gradient, but state requires one"):
        efla.step_(**token, state=leaf_state)
    with torch.no_grad():
        assert not efla.step_(**token, state=leaf_state).requires_grad


def test_autograd_notices_the_change_of_state():
    state = inputs(tokens=1)["initial_state"]
    version = state._version
    product = (state * torch.ones(1, requires_grad=True)).sum()  # saves state
    token, _ = one_token(inputs(tokens=1))
    efla.step_(**token, state=state)
    assert state._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():
        efla.step_(**token, state=torch.zeros_like(state))
        efla.step_(**token, state=state)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_any_number_of_threads(threads):
    token, state = one_token(inputs(batch=5, tokens=1, heads=4, key_dim=64, value_dim=64))
    expected = state.clone()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        o_ref = efla.step_(**token, state=expected)
        torch.set_num_threads(threads)
        o = efla.step_(**token, state=state)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(o, o_ref) and torch.equal(state, expected)
