"""efla.step_ on states stored in 16 bits: read once a call, float32 inside, rounded once.

On a GPU, or with EFLA_TEST_DEVICE=cpu on the CPU. The expectation is the float64 operator on the same
stored states.
"""

import cases
import efla
import pytest
import torch
from device_support import (
    DEVICE,
    LIMITS,
    needs_device,
    needs_gpu,
    on_device,
    poisoned_memory,
    problem,
)

pytestmark = needs_device
BFLOAT16, FLOAT16, FLOAT32, FLOAT64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# The largest relative rounding: half the spacing of the numbers just above a power of two.
ROUNDING = {BFLOAT16: 2.0**-8, FLOAT16: 2.0**-11}
STORAGES = list(ROUNDING)


def make(dtype, storage, *, pool=None, **sizes):
    """(arguments without the state, pool of states that `storage` holds exactly), in float64."""
    case = problem(dtype, **sizes)
    state = case.pop("initial_state")
    del case["grad_o"], case["grad_final_state"]
    if pool is not None:
        state = torch.randn(pool, *state.shape[1:], generator=torch.Generator().manual_seed(9))
    return case, state.to(storage).double()


def step(case, state, dtype, storage, device=None, **options):
    """(o, the state afterwards) on the device, the state stored in `storage`."""
    device = DEVICE if device is None else device
    tensors = on_device(case, dtype, device)
    state = state.to(device, storage, copy=True)
    if options.get("state_indices") is not None:
        options["state_indices"] = options["state_indices"].to(device)
    with poisoned_memory():
        o = efla.step_(**tensors, state=state, **options)
    assert o.dtype == dtype and state.dtype == storage
    return o, state


def reference(case, state, **options):
    return step(case, state, FLOAT64, FLOAT64, "cpu", **options)


def close(found, expected, dtype, storage, where=""):
    """o as exact as with a float32 state, every element of the state within one rounding."""
    o, o_ref = found[0].double().cpu(), expected[0]
    error = ((o - o_ref).norm() / o_ref.norm().clamp_min(1e-30)).item()
    assert error <= LIMITS[dtype][0], f"{where}: o: relative RMS {error:.2e}"
    state, state_ref = found[1].double().cpu(), expected[1]
    # Arithmetic in float32 comes on top: 1e-5 as elsewhere, of the largest element.
    allowed = ROUNDING[storage] * state_ref.abs() + 1e-5 * state_ref.abs().max()
    excess = ((state - state_ref).abs() - allowed).max().item()
    assert excess <= 0, f"{where}: state: {excess:.2e} more than one rounding"


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("rule,decay", cases.RULES_AND_DECAY)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16])
def test_every_rule_rounds_once(rule, decay, dtype, storage):
    for dim, tokens in [
        ((64, 64), 1),
        ((128, 128), 3),
        ((60, 100), 2),
        ((7, 3), 8),
        ((256, 65), 1),
    ]:
        case, state = make(
            dtype, storage, batch=3, tokens=tokens, heads=2, value_heads=4, key_dim=dim[0],
            value_dim=dim[1], decay=decay,
        )  # fmt: skip
        options = dict(rule=rule, qk_l2norm=tokens == 3)
        found = step(case, state, dtype, storage, **options)
        close(found, reference(case, state, **options), dtype, storage, f"{rule} {dim} {tokens}")


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("tokens", range(1, 9))
def test_tokens_of_one_call_share_one_rounding(tokens, storage):
    """float32 inputs, so that a rounding between two tokens would show in o."""
    case, state = make(
        FLOAT32, storage, batch=2, tokens=tokens, key_dim=64, value_dim=64, decay=True
    )
    found = step(case, state, FLOAT32, storage, scale=0.3)
    close(found, reference(case, state, scale=0.3), FLOAT32, storage, f"T = {tokens}")
    rounded = found[1].double().cpu()
    assert not torch.equal(rounded, reference(case, state, scale=0.3)[1])


def test_head_dim_512():
    case, state = make(
        BFLOAT16, BFLOAT16, batch=1, tokens=2, key_dim=512, value_dim=512, decay=True
    )
    found = step(case, state, BFLOAT16, BFLOAT16)
    close(found, reference(case, state), BFLOAT16, BFLOAT16)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("dim", [128, 96, 5])
def test_only_the_named_rows_of_a_pool_change(tokens, storage, dim):
    indices = torch.tensor([5, -1, 2, 0, -1], dtype=torch.int32)
    named, unnamed = [5, 2, 0], [1, 3, 4, 6]
    case, pool = make(
        BFLOAT16, storage, batch=5, tokens=tokens, pool=7, heads=2, value_heads=4, key_dim=dim,
        value_dim=dim,
    )  # fmt: skip
    expected = reference(case, pool, state_indices=indices)
    for t in case.values():
        if t is not None:
            t[[1, 4]] = float("nan")  # padding rows may hold anything
    pool[3] = float("nan")  # and so may states that nobody names
    before = pool.to(storage)
    o, state = step(case, pool, BFLOAT16, storage, state_indices=indices)
    close((o, state[named]), (expected[0], expected[1][named]), BFLOAT16, storage)
    assert not o[[1, 4]].any()
    bits = state.cpu().view(torch.int16)
    assert torch.equal(bits[unnamed], before[unnamed].view(torch.int16))
    assert not torch.equal(bits[named], before[named].view(torch.int16))
    o, state = step(case, pool, BFLOAT16, storage, state_indices=torch.full((5,), -1))
    assert not o.any() and torch.equal(state.cpu().view(torch.int16), before.view(torch.int16))


@pytest.mark.parametrize("storage", STORAGES)
def test_a_layer_of_a_larger_pool(storage):
    case, state = make(BFLOAT16, storage, batch=3, tokens=2, key_dim=64, value_dim=64, decay=True)
    o, final = step(case, state, BFLOAT16, storage)
    layers = torch.randn(3, 2, *state.shape[1:]).to(DEVICE, storage)
    layers[:, 1] = state.to(DEVICE, storage)
    other = layers[:, 0].clone()
    assert torch.equal(efla.step_(**on_device(case, BFLOAT16), state=layers[:, 1]), o)
    assert torch.equal(layers[:, 1], final) and torch.equal(layers[:, 0], other)
    # Rows that do not start where the kernels' vectors would.
    flat = torch.zeros(final.numel() + 1, device=DEVICE, dtype=storage)[1:].view(final.shape)
    flat.copy_(state)
    # They may add up in another order: as near to the truth as any.
    other = efla.step_(**on_device(case, BFLOAT16), state=flat)
    close((other, flat), reference(case, state), BFLOAT16, storage, "unaligned pool")


@pytest.mark.parametrize("storage", STORAGES)
def test_a_decode_loop_against_a_reference_that_rounds(storage):
    """32 calls. A rounding goes the other way where float32's error, 1e-6 of a state, reaches over the
    middle between two neighbours, which are 2 * ROUNDING apart."""
    case, state = make(FLOAT32, storage, batch=2, tokens=32, heads=2, value_heads=4, key_dim=32,
                       value_dim=32, decay=True)  # fmt: skip
    tensors = on_device(case, FLOAT32)
    found, expected = state.to(DEVICE, storage, copy=True), state
    for t in range(32):
        o = efla.step_(**{n: x[:, t] for n, x in tensors.items()}, state=found)
        o_ref, expected = reference({n: x[:, t] for n, x in case.items()}, expected)
        expected = expected.to(storage).double()
    rounding = ROUNDING[storage]
    share = 32 * 1e-6 / (2 * rounding)  # of elements whose rounding went the other way
    limit = 2 * rounding * share**0.5 + 1e-5
    for x, y in ((o, o_ref), (found, expected)):
        assert ((x.double().cpu() - y).norm() / y.norm()).item() <= limit


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("decay", [False, True])
def test_the_drift_of_2000_steps(decay, tokens, storage):
    """Beside a float64 state that is never rounded. With E the difference and r the rounding of a call,
    E <- e^g (I - e k k^T) E + r, and the matrix is a contraction. So |E| is at most the sum of the |r|,
    each faded by the decays after it, |r| <= ROUNDING |S|; and roundings of independent elements, evenly
    spread, add up as squares, |r|^2 = (ROUNDING |S|)^2 / 3 at most."""
    steps, heads = 2000, 3
    case, state = make(FLOAT32, storage, batch=2, tokens=steps, heads=heads, key_dim=16, value_dim=8,
                       decay=decay)  # fmt: skip
    tensors = on_device(case, FLOAT32)
    options = dict(rule="exact_log")
    found, exact = state.to(DEVICE, storage, copy=True), state.clone()
    largest = torch.zeros(2, heads, dtype=FLOAT64)
    squares = torch.zeros(2, heads, dtype=FLOAT64)
    for t in range(0, steps, tokens):
        part = {n: None if x is None else x[:, t : t + tokens] for n, x in tensors.items()}
        efla.step_(**part, state=found, **options)
        part = {n: None if x is None else x[:, t : t + tokens] for n, x in case.items()}
        efla.step_(**part, state=exact, **options)
        fade = part["log_decay"].sum(1).exp() if decay else torch.ones(2, heads, dtype=FLOAT64)
        # After the rounding an element is at most ROUNDING of itself from what was rounded; 1e-6 for
        # the float32 arithmetic of a call.
        rounded = found.double().cpu().flatten(2).norm(dim=-1)
        rounding = (ROUNDING[storage] + 1e-6) * rounded / (1 - ROUNDING[storage])
        largest = fade * largest + rounding
        squares = fade**2 * squares + rounding**2 / 3
    drift = (found.double().cpu() - exact).flatten(2).norm(dim=-1)
    size = exact.flatten(2).norm(dim=-1)
    assert (drift <= largest).all(), (drift / size, largest / size)
    assert (drift <= squares.sqrt()).all(), (drift / size, squares.sqrt() / size)
    assert (drift >= ROUNDING[storage] / 8 * size).all()  # it was stored in 16 bits
    if not decay and tokens == 1:  # what the documentation says: sqrt(n) times half a rounding
        assert (drift <= 2000**0.5 * ROUNDING[storage] / 2 * size).all()


def test_storages_that_do_not_fit_are_refused():
    case, state = make(FLOAT32, BFLOAT16, batch=2, tokens=1, key_dim=16, value_dim=16)
    tensors = on_device(case, FLOAT32)
    for other in (FLOAT64, torch.int16, torch.float8_e4m3fn):
        wrong = state.to(DEVICE).to(other)
        before = wrong.clone()
        with pytest.raises(RuntimeError, match="state must be Float, BFloat16 or Half for Float q"):
            efla.step_(**tensors, state=wrong)
        assert torch.equal(wrong.view(torch.uint8), before.view(torch.uint8))
    wide = on_device(case, FLOAT64, "cpu")
    for storage in STORAGES:
        with pytest.raises(RuntimeError, match="state must be Double for Double q"):
            efla.step_(**wide, state=state.to(storage))
    with pytest.raises(RuntimeError, match="initial_state must be Float for Float q"):
        efla.chunk(**tensors, initial_state=state.to(DEVICE, BFLOAT16))


@pytest.mark.parametrize("storage", STORAGES)
def test_compiles_and_knows_its_shapes(storage):
    torch._dynamo.reset()
    case, state = make(BFLOAT16, storage, batch=2, tokens=1, key_dim=64, value_dim=64)
    tensors, expected = on_device(case, BFLOAT16), state.to(DEVICE, storage)
    found = expected.clone()
    meta = {n: None if t is None else t.to("meta") for n, t in tensors.items()}
    o = efla.step_(**meta, state=expected.to("meta"))
    assert o.shape == tensors["v"].shape and o.dtype == BFLOAT16
    torch.library.opcheck(
        torch.ops.efla.step_.default,
        (*(tensors[n] for n in ("q", "k", "v", "beta")), expected.clone(), None),
        dict(state_indices=torch.tensor([1, -1], device=DEVICE)),
    )

    def decode(tensors, state):
        efla.step_(**tensors, state=state)
        return efla.step_(**tensors, state=state)

    with torch.no_grad():
        o = decode(tensors, expected)
        compiled = torch.compile(decode, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(tensors, found), o) and torch.equal(found, expected)


@needs_gpu
@pytest.mark.parametrize("storage", STORAGES)
def test_in_a_graph(storage):
    case, pool = make(BFLOAT16, storage, batch=4, tokens=3, pool=9, key_dim=128, value_dim=128)
    tensors = on_device(case, BFLOAT16)
    static = {n: None if t is None else t[:, 0].clone() for n, t in tensors.items()}
    state = pool.to(DEVICE, storage)
    indices = torch.tensor([0, 1, 2, -1], device=DEVICE)
    efla.step_(**static, state=state, state_indices=indices)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = efla.step_(**static, state=state, state_indices=indices)
    state.copy_(pool)
    expected = state.clone()
    for t, row in enumerate([[0, 1, 2, -1], [3, 2, 1, 0], [-1, -1, 8, 7]]):
        for name, x in static.items():
            if x is not None:
                x.copy_(tensors[name][:, t])
        indices.copy_(torch.tensor(row))
        graph.replay()
        o = efla.step_(**static, state=expected, state_indices=torch.tensor(row, device=DEVICE))
        assert torch.equal(captured, o) and torch.equal(state, expected), t
