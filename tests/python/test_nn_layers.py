"""efla.nn: values against float64, decoding, padding, and what torch's tools ask of a module."""

import copy
import math

import efla
import pytest
import torch
from layer_reference import layer_output
from reference import relative_error
from torch.utils.checkpoint import checkpoint

UNGATED = {
    "efla": {},
    "delta_net": dict(rule="euler", qk_norm="l2"),
    "negative eigenvalues": dict(rule="euler", qk_norm="l2", allow_neg_eigval=True),
    "rk4, gate": dict(rule="rk4", qk_norm="l2", use_gate=True),
    "softplus, q_norm": dict(beta_activation="softplus", q_norm="l2"),
    "adaptive": dict(beta_activation="adaptive", expand_k=0.5, expand_v=2.0),
    "no beta, no norm": dict(use_beta=False, use_output_norm=False, qk_norm="l2"),
    "no norm, gate": dict(use_output_norm=False, use_gate=True),
    "conv bias": dict(conv_bias=True, conv_size=3),
    "no convolution": dict(use_short_conv=False),
    "elu, sum": dict(qk_activation="elu", qk_norm="sum"),
    "relu": dict(qk_activation="relu"),
    "identity, no convolution": dict(qk_activation="identity", use_short_conv=False, qk_norm="l2"),
}
GATED = {
    "gated_efla": {},
    "exact_log, groups": dict(rule="exact_log", num_v_heads=4),
    "gated_deltanet": dict(rule="euler", qk_norm="l2", allow_neg_eigval=True),
    "linear, no gate": dict(rule="linear", use_gate=False),
    "adaptive": dict(beta_activation="adaptive", q_norm="l2"),
}
ALL = [("ungated", name) for name in UNGATED] + [("gated", name) for name in GATED]
SOME = [("ungated", "efla"), ("ungated", "delta_net"), ("gated", "exact_log, groups")]


def make(kind, name, dtype=torch.float32, **changes):
    """A layer in which every parameter matters."""
    torch.manual_seed(0)
    if kind == "gated":
        fields = dict(hidden_size=24, num_heads=2, head_dim=8, expand_v=1.5, **GATED[name])
        layer = efla.nn.GatedEFLA(**{**fields, "layer_idx": 0, "dtype": dtype, **changes})
    else:
        fields = dict(hidden_size=24, num_heads=2, **UNGATED[name])
        layer = efla.nn.EFLA(**{**fields, "layer_idx": 0, "dtype": dtype, **changes})
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def hidden(batch=2, length=13, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, 24, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("kind,name", ALL)
def test_values_and_gradients(kind, name):
    layer = make(kind, name, torch.float64)
    x = hidden(length=7, dtype=torch.float64).requires_grad_()
    y, attentions, cache = layer(x)
    assert attentions is None and cache is None
    expected = layer_output(layer, x)
    assert relative_error(y, expected) < 1e-10
    leaves = [x, *layer.parameters()]
    weight = torch.randn_like(y)
    ours = torch.autograd.grad((y * weight).sum(), leaves)
    theirs = torch.autograd.grad((expected * weight).sum(), leaves)
    for a, b, leaf_name in zip(ours, theirs, ["x", *dict(layer.named_parameters())]):
        assert a.shape == b.shape and (a - b).norm() <= 1e-8 * b.norm(), leaf_name


@pytest.mark.parametrize("kind,name", SOME)
@pytest.mark.parametrize("dtype,bound", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_values_in_other_types(kind, name, dtype, bound):
    layer, x = make(kind, name, dtype), hidden(dtype=dtype)
    y = layer(x)[0]
    assert y.dtype == dtype and relative_error(y, layer_output(layer, x)) < bound
    if kind == "gated":
        assert layer.A_log.dtype == torch.float32


def test_packed_sequences():
    layer, x = make("gated", "gated_efla", torch.float64), hidden(1, 20, torch.float64)
    offsets = torch.tensor([0, 6, 6, 7, 20])
    y = layer(x, cu_seqlens=offsets)[0]
    assert relative_error(y, layer_output(layer, x, offsets)) < 1e-10


# --- The cache -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind,name", ALL)
def test_pieces_equal_the_whole(kind, name):
    layer, x = make(kind, name), hidden()
    with torch.set_grad_enabled((kind, name) in SOME):  # a longer way through where it is on
        whole = layer(x)[0]
        cache, pieces = efla.nn.Cache(), []
        for start, end in [(0, 5), (5, 5), (5, 6), (6, 7), (7, 10), (10, 13)]:
            y, _, returned = layer(x[:, start:end], past_key_values=cache)
            assert returned is cache
            pieces.append(y)
    assert cache.get_seq_length() == 13
    assert relative_error(torch.cat(pieces, 1), whole) < 1e-5


def test_token_by_token_from_nothing_and_the_other_mode():
    for kind, name in SOME:
        layer, x = make(kind, name), hidden()
        with torch.no_grad():
            whole, _, cache = layer(x, use_cache=True)
            step_cache = efla.nn.Cache()
            steps = [layer(x[:, t : t + 1], past_key_values=step_cache)[0] for t in range(13)]
            layer.mode = "fused_recurrent"
            assert relative_error(layer(x)[0], whole) < 1e-5
        assert relative_error(torch.cat(steps, 1), whole) < 1e-5
        for a, b in zip(cache.layers, step_cache.layers):
            for tensor_name, tensor in a.tensors().items():
                assert relative_error(b.tensors()[tensor_name], tensor) < 1e-5, tensor_name


def test_steps_update_the_state_in_place():
    layer, x = make("gated", "gated_efla"), hidden()
    with torch.no_grad():
        _, _, cache = layer(x[:, :6], use_cache=True)
        before = {n: (t.data_ptr(), t.clone()) for n, t in cache.layers[0].tensors().items()}
        for t in (6, 7):
            layer(x[:, t : t + 1], past_key_values=cache)
    assert len(before) == 4
    for n, tensor in cache.layers[0].tensors().items():
        assert tensor.data_ptr() == before[n][0] and not torch.equal(tensor, before[n][1])


def test_use_cache_false_reads_the_cache_and_leaves_it():
    layer, x = make("gated", "gated_efla"), hidden()
    with torch.no_grad():
        whole, _, cache = layer(x, use_cache=True)[0], *layer(x[:, :6], use_cache=True)[1:]
        before = copy.deepcopy(cache)
        for end in (7, 13):
            y, _, _ = layer(x[:, 6:end], past_key_values=cache, use_cache=False)
            assert relative_error(y, whole[:, 6:end]) < 1e-5
    assert cache.get_seq_length() == 6
    for n, tensor in cache.layers[0].tensors().items():
        assert torch.equal(tensor, before.layers[0].tensors()[n])


def test_rows_of_a_cache():
    layer, x = make("ungated", "efla"), hidden(3)
    with torch.no_grad():
        _, _, cache = layer(x[:, :7], use_cache=True)
        expected = layer(x)[0][:, 7:]
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        y, _, _ = layer(x[[2, 0, 0], 7:], past_key_values=cache)
        assert relative_error(y, expected[[2, 0, 0]]) < 1e-5
        cache.batch_select_indices(torch.tensor([1]))
        cache.batch_repeat_interleave(2)
        assert {t.shape[0] for t in cache.layers[0].tensors().values()} == {2}
        cache.reset()
        assert len(cache) == 0 and cache.get_seq_length() == 0
        assert relative_error(layer(x, past_key_values=cache)[0], layer(x)[0]) < 1e-6


# --- Padding -------------------------------------------------------------------------------------

MASKS = {
    "left": [[0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1] * 13],
    "right": [[1] * 13, [1] * 9 + [0] * 4],
    "holes": [[1, 0, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1, 1], [0] * 13],
    "none": [[1] * 13, [1] * 13],
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("attention", [False, True])
def test_padded_rows_are_their_valid_tokens_alone(name, attention):
    layer = make("gated", "gated_efla")
    if attention:
        layer = efla.nn.SoftmaxAttention(24, 2, num_kv_heads=1, layer_idx=0)
    x, mask = hidden(), torch.tensor(MASKS[name])
    x = x.masked_fill(mask[..., None] == 0, float("nan")).requires_grad_()  # nobody looks there
    cache = efla.nn.Cache()
    y, _, _ = layer(x, attention_mask=mask, past_key_values=cache)
    assert y.shape == x.shape and not y[mask == 0].any()
    y.square().sum().backward()
    assert x.grad.isfinite().all() and not x.grad[mask == 0].any()
    token = hidden(length=1, seed=2)
    following = layer(token, attention_mask=torch.cat([mask, mask.new_ones(2, 1)], 1),
                      past_key_values=cache)[0]  # fmt: skip
    for row in range(2):
        valid = x.detach()[row : row + 1, mask[row] != 0]
        alone, own = layer(valid, use_cache=True)[::2]
        if valid.shape[1]:
            assert relative_error(y[row : row + 1, mask[row] != 0], alone) < 1e-5
        expected = layer(token[row : row + 1], past_key_values=own)[0]
        assert relative_error(following[row : row + 1], expected) < 1e-5


# --- torch's tools -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind,name", SOME)
def test_checkpointing_changes_nothing(kind, name):
    layer = make(kind, name)
    results = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        x = hidden().requires_grad_()
        layer.zero_grad()
        run(x)[0].square().sum().backward()
        results.append([x.grad] + [p.grad.clone() for p in layer.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("kind,name", [*SOME, ("ungated", "elu, sum"), ("ungated", "conv bias")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(kind, name, dtype):
    layer, x = make(kind, name), hidden().requires_grad_()
    expected = layer(x)[0]
    with torch.autocast("cpu", dtype):
        y, _, cache = layer(x, use_cache=True)
        with torch.no_grad():
            stepped = layer(x[:, :1], past_key_values=cache)[0]
    assert y.dtype == dtype and stepped.dtype == dtype
    assert relative_error(y, expected) < 3e-2
    y.float().square().sum().backward()
    assert all(p.grad.dtype == p.dtype and p.grad.isfinite().all() for p in layer.parameters())
    assert cache.layers[0].recurrent_state.dtype == torch.float32


@pytest.mark.parametrize("kind,name,autocast", [(*SOME[0], False), (*SOME[2], True)])
def test_compiles_without_graph_breaks(kind, name, autocast):
    torch._dynamo.reset()
    layer = make(kind, name)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    gradients = []
    for run in (layer, compiled):
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = run(hidden())[0]
        y.float().square().sum().backward()
        gradients.append([y] + [p.grad.clone() for p in layer.parameters()])
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b)


def test_compiles_with_inductor():
    torch._dynamo.reset()
    layer = make("ungated", "efla")
    with (
        torch.no_grad()
    ):  # half the code to compile; test_compile.py has gradients through inductor
        y = torch.compile(layer, fullgraph=True)(hidden())[0]
    torch.testing.assert_close(y, layer(hidden())[0])


@pytest.mark.parametrize("kind,name", SOME[::2])
def test_compiled_decoding_is_one_graph_for_all_steps(kind, name):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    layer, x = make(kind, name), hidden()

    @torch.compile(fullgraph=True, backend=counter)
    def decode(token, cache):
        return layer(token, past_key_values=cache)[0]

    with torch.no_grad():
        whole, cache = layer(x)[0], efla.nn.Cache()
        layer(x[:, :3], past_key_values=cache)
        steps = [decode(x[:, t : t + 1], cache) for t in range(3, 13)]
    assert relative_error(torch.cat(steps, 1), whole[:, 3:]) < 1e-5
    assert cache.get_seq_length() == 13
    assert counter.frame_count <= 2  # the second one for a position that varies


@pytest.mark.parametrize("kind,name", [("ungated", "adaptive"), ("gated", "adaptive")])
def test_meta_device_deepcopy_and_state_dict(kind, name):
    layer, x = make(kind, name), hidden()
    clone = copy.deepcopy(layer)
    assert torch.equal(clone(x)[0], layer(x)[0])
    empty = make(kind, name, device="meta")
    assert all(p.is_meta for p in empty.parameters())
    assert empty(x.to("meta"))[0].shape == x.shape
    empty.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in empty.parameters():
            parameter.fill_(float("nan"))
    for module in empty.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(p.isfinite().all() for p in empty.parameters())
    empty.load_state_dict(layer.state_dict())
    assert torch.equal(empty(x)[0], layer(x)[0])


def test_first_values_of_the_decay():
    torch.manual_seed(0)
    layer = efla.nn.GatedEFLA(hidden_size=16, num_heads=2000, head_dim=1, expand_v=1.0)
    a, dt = layer.A_log.exp(), torch.nn.functional.softplus(layer.dt_bias)
    assert 0 < a.min() < 0.1 and 15.9 < a.max() < 16 and abs(a.mean() - 8) < 0.4
    assert dt.min() > 0.00099 and dt.max() < 0.101
    assert abs(dt.log().mean() - math.log(0.01)) < 0.1
    assert layer.A_log._no_weight_decay and layer.dt_bias._no_weight_decay


PARAMETERS = {
    "delta": "q_proj.weight k_proj.weight v_proj.weight b_proj.weight q_conv1d.weight "
    "k_conv1d.weight v_conv1d.weight g_proj.weight o_norm.weight o_proj.weight",
    "gated": "A_log dt_bias q_proj.weight k_proj.weight v_proj.weight a_proj.weight b_proj.weight "
    "q_conv1d.weight k_conv1d.weight v_conv1d.weight g_proj.weight o_norm.weight o_proj.weight",
}


def test_parameter_names_are_flas():
    delta = efla.nn.EFLA(hidden_size=24, num_heads=2, use_gate=True)
    assert sorted(delta.state_dict()) == sorted(PARAMETERS["delta"].split())
    gated = efla.nn.GatedEFLA(hidden_size=24, num_heads=2, head_dim=8)
    assert sorted(gated.state_dict()) == sorted(PARAMETERS["gated"].split())
    assert delta.q_conv1d.weight.shape == (24, 1, 4) and gated.v_proj.weight.shape == (32, 24)


@pytest.mark.parametrize(
    "build,match",
    [
        (lambda: efla.nn.EFLA(rule="heun"), "rule must be one of linear, euler.*not 'heun'"),
        (lambda: efla.nn.EFLA(rule="exact_log"), "rule must be one of"),
        (lambda: efla.nn.GatedEFLA(rule="rk4"), "rule must be one of"),
        (lambda: efla.nn.EFLA(num_heads=3), "num_heads must be a divisor of hidden_size"),
        (lambda: efla.nn.EFLA(num_heads=0), "num_heads must be at least 1"),
        (lambda: efla.nn.EFLA(hidden_size=10, expand_k=0.33), "expand_k must be a whole number"),
        (lambda: efla.nn.GatedEFLA(num_heads=2, num_v_heads=3), "num_v_heads must be a multiple"),
        (lambda: efla.nn.GatedEFLA(head_dim=7, expand_v=1.5), "expand_v must be a whole number"),
        (lambda: efla.nn.EFLA(allow_neg_eigval=True), "exact flow has no negative eigenvalues"),
        (lambda: efla.nn.EFLA(qk_norm="rms"), "qk_norm must be one of none, l2, sum"),
        (lambda: efla.nn.EFLA(mode="fused_chunk"), "mode must be one of chunk, fused_recurrent"),
        (
            lambda: efla.nn.EFLA(use_beta=False, beta_activation="softplus"),
            "beta_activation must be left at sigmoid",
        ),
        (lambda: efla.nn.SoftmaxAttention(24, 5), "num_heads must be a divisor"),
        (lambda: efla.nn.SoftmaxAttention(24, 4, 3), "num_kv_heads must be a divisor"),
        (lambda: efla.nn.SoftmaxAttention(24, 4, window_size=0), "window_size must be at least 1"),
    ],
)
def test_bad_fields(build, match):
    with pytest.raises(ValueError, match=match):
        build()


def test_bad_calls():
    with pytest.raises(TypeError, match="unexpected keyword argument 'expand'"):
        efla.nn.EFLA(expand=2)
    layer, x = make("ungated", "efla"), hidden()
    with pytest.raises(TypeError, match="unexpected keyword argument 'cu_seqlen'"):
        layer(x, cu_seqlen=torch.tensor([0, 13]))
    with pytest.raises(ValueError, match=r"attention_mask must have shape \[B, T\] = \[2, 13\]"):
        layer(x, attention_mask=torch.ones(2, 12, dtype=torch.int64))
    with pytest.raises(TypeError, match="attention_mask must be bool or integer"):
        layer(x, attention_mask=torch.ones(2, 13))
    with pytest.raises(ValueError, match="needs its layer_idx"):
        make("ungated", "efla", layer_idx=None)(x, past_key_values=efla.nn.Cache())
    _, _, cache = layer(x, use_cache=True)
    with pytest.raises(RuntimeError, match="initial_state must have shape"):
        layer(hidden(3), past_key_values=cache)


# --- Softmax layers of hybrids -------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 1, 4, 50])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_softmax_attention(window, kv_heads):
    torch.manual_seed(0)
    layer = efla.nn.SoftmaxAttention(
        24, 2, kv_heads, qkv_bias=True, window_size=window, rope_theta=100.0, layer_idx=0
    ).double()
    x = hidden(dtype=torch.float64)

    def rotated(y):  # pairs (i, i + 6) turn by position * theta^(-i / 6)
        angle = torch.arange(13.0).double()[:, None] * 100.0 ** -(torch.arange(6.0).double() / 6)
        turn = torch.polar(torch.ones_like(angle), angle)[None, :, None]
        y = torch.view_as_real(torch.complex(y[..., :6], y[..., 6:]) * turn)
        return torch.cat([y[..., 0], y[..., 1]], -1)

    q, k, v = (p(x).unflatten(-1, (-1, 12)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k = rotated(q), rotated(k)
    k, v = (t.repeat_interleave(2 // kv_heads, 2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * 12**-0.5
    i, j = torch.arange(13)[:, None], torch.arange(13)[None, :]
    seen = (j <= i) if window is None else (j <= i) & (j > i - window)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    expected = layer.o_proj(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(-2))
    assert relative_error(layer(x)[0], expected) < 1e-12
    cache, pieces = efla.nn.Cache(), []
    for start, end in [(0, 5), (5, 6), (6, 13)]:
        pieces.append(layer(x[:, start:end], past_key_values=cache)[0])
    assert relative_error(torch.cat(pieces, 1), expected) < 1e-12
    if window is not None:
        assert cache.layers[0].keys.shape[1] <= max(window - 1, 0) or window == 50
    # Packed: two sequences, rows before and after them.
    packed = layer(x[:1], cu_seqlens=torch.tensor([1, 5, 5, 12]))[0]
    alone = torch.cat([layer(x[:1, 1:5])[0], layer(x[:1, 5:12])[0]], 1)
    assert relative_error(packed[:, 1:12], alone) < 1e-12
