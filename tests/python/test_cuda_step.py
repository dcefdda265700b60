"""efla.step_ on a GPU: decoding and short T, in place on a pool of states, against float64 on the CPU."""

import cases
import efla
import pytest
import torch
from device_support import (
    DEVICE,
    DTYPES,
    LIMITS,
    ON_GPU,
    needs_device,
    needs_gpu,
    on_device,
    poisoned_memory,
    problem,
)

pytestmark = needs_device
BFLOAT16 = torch.bfloat16


def make(dtype, *, pool=None, indices=None, token_axis=True, **sizes):
    """(arguments without the state, pool of states [P, HV, K, V]) in float64."""
    case = problem(dtype, **sizes)
    state = case.pop("initial_state")
    del case["grad_o"], case["grad_final_state"]
    if pool is not None:
        g = torch.Generator().manual_seed(9)
        state = torch.randn(pool, *state.shape[1:], generator=g).double()
    if not token_axis:
        case = {n: None if t is None else t[:, 0] for n, t in case.items()}
    return case, state


def step(case, state, dtype, device=None, indices=None, poison=True, **options):
    """(o, the state afterwards) on the device."""
    tensors = on_device(case, dtype, device)
    state = on_device({"state": state}, dtype, device)["state"].clone()
    if indices is not None:
        options["state_indices"] = torch.as_tensor(indices).to(state.device)
    with poisoned_memory():
        o = efla.step_(**tensors, state=state, **options)
    return o, state


def close(found, expected, dtype, where):
    for name, x, y in zip(("o", "state"), found, expected):
        error = ((x.double().cpu() - y).norm() / y.norm().clamp_min(1e-30)).item()
        # The state is float32 whatever the dtype: only the inputs are rounded, and those alike.
        limit = LIMITS[dtype][0] if name == "o" else LIMITS[torch.float32][0]
        assert error <= limit, f"{where}: {name}: relative RMS {error:.2e} > {limit:.1e}"


def check(case, state, dtype, where="", **options):
    expected = step(case, state, torch.float64, "cpu", **options)
    found = step(case, state, dtype, **options)
    close(found, expected, dtype, where)
    return found


@pytest.mark.parametrize("rule,decay", cases.RULES_AND_DECAY)
@pytest.mark.parametrize("key_dim,value_dim", [*cases.HEAD_SIZES, (60, 100), (512, 512)])
def test_every_rule_and_head_size(rule, decay, key_dim, value_dim):
    if key_dim == 512 and (rule, decay) != ("exact", True):
        return
    for dtype in DTYPES:
        for tokens in (1, 3):
            case, state = make(
                dtype, batch=3, tokens=tokens, heads=2, value_heads=4, key_dim=key_dim,
                value_dim=value_dim, decay=decay,
            )  # fmt: skip
            where = f"{rule} {key_dim}x{value_dim} T = {tokens}"
            check(case, state, dtype, where, rule=rule, qk_l2norm=tokens == 3)


@pytest.mark.parametrize("tokens", range(1, 9))
@pytest.mark.parametrize("dim", [64, 128])
def test_short_runs_of_tokens(tokens, dim):
    case, state = make(BFLOAT16, batch=5, tokens=tokens, key_dim=dim, value_dim=dim, decay=True)
    o, final = check(case, state, BFLOAT16, f"T = {tokens}", scale=0.3)
    one_by_one = state
    for t in range(tokens):
        token = {n: x[:, t] for n, x in case.items()}
        o_t, one_by_one = step(token, one_by_one, BFLOAT16, scale=0.3)
        torch.testing.assert_close(o_t, o[:, t], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(one_by_one, final, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 2, 7, 64, 257])
def test_batches(batch):
    case, state = make(
        BFLOAT16, batch=batch, tokens=1, heads=4, value_heads=8, key_dim=128, value_dim=128,
        token_axis=False,
    )  # fmt: skip
    check(case, state, BFLOAT16, f"batch {batch}")


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("index_type", [torch.int32, torch.int64])
@pytest.mark.parametrize("dim", [64, 128, 96])
def test_pool_with_padding_rows(tokens, index_type, dim):
    indices = [5, -1, 2, 0, -1]
    case, pool = make(BFLOAT16, batch=5, tokens=tokens, pool=7, key_dim=dim, value_dim=dim)
    expected = step(case, pool, torch.float64, "cpu", indices=indices)
    for t in case.values():
        if t is not None:
            t[[1, 4]] = float("nan")  # padding rows may hold anything
    wide = torch.tensor([i for row in indices for i in (row, 99)], dtype=index_type)
    found = step(case, pool, BFLOAT16, indices=wide.to(DEVICE)[::2])  # strided
    close(found, expected, BFLOAT16, "pool")
    o, state = found
    assert not o[[1, 4]].any()
    untouched = [1, 3, 4, 6]
    assert torch.equal(state[untouched].cpu(), pool[untouched].float())
    o, state = step(case, pool, BFLOAT16, indices=[-1] * 5)
    assert not o.any() and torch.equal(state.cpu(), pool.float())


def test_states_and_inputs_with_other_strides():
    case, state = make(BFLOAT16, batch=3, tokens=2, key_dim=64, value_dim=64, decay=True)
    o, final = step(case, state, BFLOAT16)
    tensors = {n: cases.strided(t, "transposed heads") for n, t in on_device(case, BFLOAT16).items()}
    layers = torch.randn(3, 2, *state.shape[1:], device=DEVICE)  # a layer of a larger pool
    layers[:, 1] = state.to(DEVICE)
    other = layers[:, 0].clone()
    assert torch.equal(efla.step_(**tensors, state=layers[:, 1]), o)
    assert torch.equal(layers[:, 1], final) and torch.equal(layers[:, 0], other)


def test_extreme_steps_stay_finite():
    for beta, key in [(0.0, 1.0), (1.0, 0.0), (1.0, 1e-18), (1.0, 1000.0), (1e6, 1.0)]:
        case, state = make(BFLOAT16, batch=2, tokens=3, key_dim=64, value_dim=64)
        case["beta"] = torch.full_like(case["beta"], beta)
        case["k"] = (case["k"] * key).bfloat16().double()
        check(case, state, BFLOAT16, f"beta {beta}, |k| {key}")


@needs_gpu
def test_graph_of_a_decode_loop():
    """One captured step, replayed with new tokens and new pool rows."""
    case, pool = make(BFLOAT16, batch=4, tokens=6, pool=9, key_dim=128, value_dim=128)
    tensors = on_device(case, BFLOAT16)
    static = {n: None if t is None else t[:, 0].clone() for n, t in tensors.items()}
    state = pool.float().to(DEVICE)
    indices = torch.tensor([0, 1, 2, -1], device=DEVICE, dtype=torch.int32)
    efla.step_(**static, state=state, state_indices=indices)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = efla.step_(**static, state=state, state_indices=indices)
    state.copy_(pool)
    expected = state.clone()
    rows = [[0, 1, 2, -1], [3, 2, 1, 0], [-1, -1, 8, 7], [0, 1, 2, 3], [5, 6, 7, 8], [1, -1, 3, 5]]
    for t, row in enumerate(rows):
        for name, x in static.items():
            if x is not None:
                x.copy_(tensors[name][:, t])
        indices.copy_(torch.tensor(row))
        graph.replay()
        o = efla.step_(**static, state=expected, state_indices=torch.tensor(row, device=DEVICE))
        assert torch.equal(captured, o) and torch.equal(state, expected), t


def test_compiles_whole():
    torch._dynamo.reset()
    case, state = make(BFLOAT16, batch=2, tokens=1, key_dim=64, value_dim=64)
    tensors, expected = on_device(case, BFLOAT16), state.float().to(DEVICE)
    found = expected.clone()

    def decode(tensors, state):
        efla.step_(**tensors, state=state)
        return efla.step_(**tensors, state=state)

    with torch.no_grad():
        o = decode(tensors, expected)
        compiled = torch.compile(decode, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(tensors, found), o) and torch.equal(found, expected)


@pytest.mark.huge
def test_more_rows_times_heads_than_a_grid_dimension():
    batch, heads = (600, 128) if ON_GPU else (3, 4)
    g = torch.Generator(DEVICE).manual_seed(4)

    def normal(*shape, dtype=BFLOAT16):
        return torch.randn(*shape, device=DEVICE, generator=g).to(dtype)

    tensors = {n: normal(batch, heads, 64) / 8 for n in ("q", "k", "v")}
    tensors["beta"] = normal(batch, heads, dtype=torch.float32).sigmoid()
    state = normal(batch, heads, 64, 64, dtype=torch.float32)
    sample = [0, batch // 2, batch - 1]
    case = {n: t[sample].double().cpu() for n, t in tensors.items()}
    expected = step(case, state[sample].double().cpu(), torch.float64, "cpu")
    o = efla.step_(**tensors, state=state)
    close((o[sample], state[sample]), expected, BFLOAT16, "many rows")


@needs_gpu
@pytest.mark.huge
def test_a_pool_of_more_elements_than_an_int_counts():
    pool, heads, dim = 1030, 128, 128
    state = torch.zeros(pool, heads, dim, dim, device=DEVICE)
    assert state.numel() > 2**31
    case, few = make(BFLOAT16, batch=4, tokens=1, heads=heads, key_dim=dim, value_dim=dim)
    indices = [pool - 1, 0, -1, 1025]
    rows = [pool - 1, 0, 1025]
    state[rows] = few[:3].float().to(DEVICE)
    expected_pool = few[:3].clone()
    expected = step(case, expected_pool, torch.float64, "cpu", indices=[0, 1, -1, 2])
    device_case = on_device(case, BFLOAT16)
    o = efla.step_(**device_case, state=state, state_indices=torch.tensor(indices, device=DEVICE))
    close((o, state[rows]), expected, BFLOAT16, "large pool")
    assert not state[[1, 1024, 1026, pool - 2]].any()


def test_a_refused_call_leaves_the_state_alone():
    case, state = make(BFLOAT16, batch=2, tokens=1, key_dim=64, value_dim=64)
    tensors = on_device(case, BFLOAT16)
    pool = state.float().to(DEVICE)
    for match, changes in [
        ("state must have shape", dict(state=pool[:1])),
        ("state must be Float", dict(state=pool.double())),
        ("k must have the shape of q", dict(k=tensors["k"][..., :5])),
        ("state_indices must be int32 or int64", dict(state_indices=torch.ones(2, device=DEVICE))),
        ("at most 8 tokens", {n: tensors[n].repeat_interleave(9, 1) for n in ("q", "k", "v", "beta")}),
    ]:
        before = pool.clone()
        with pytest.raises(RuntimeError, match=match):
            efla.step_(**{**tensors, "state": pool, **changes})
        assert torch.equal(pool, before)
