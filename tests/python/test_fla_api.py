"""The functions under flash-linear-attention's signatures."""

import inspect

import efla
import pytest
import torch
import torch.nn.functional as F
from cases import inputs
from reference import delta_rule, relative_error

# The parameters of fla 0.6.0, in order; what follows them here is keyword-only.
SIGNATURES = {
    "chunk_delta_rule": "q k v beta scale initial_state output_final_state use_qk_l2norm_in_kernel "
    "cu_seqlens cu_seqlens_cpu",
    "fused_recurrent_delta_rule": "q k v beta scale initial_state output_final_state "
    "use_qk_l2norm_in_kernel cu_seqlens",
    "chunk_gated_delta_rule": "q k v g beta scale initial_state output_final_state "
    "use_qk_l2norm_in_kernel use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first cu_seqlens "
    "cu_seqlens_cpu chunk_indices cp_context",
    "fused_recurrent_gated_delta_rule": "q k v g gk gv beta scale initial_state output_final_state "
    "use_qk_l2norm_in_kernel use_gate_in_kernel A_log dt_bias use_beta_sigmoid_in_kernel "
    "allow_neg_eigval state_v_first cu_seqlens",
}
UNGATED = [efla.chunk_delta_rule, efla.fused_recurrent_delta_rule]
GATED = [efla.chunk_gated_delta_rule, efla.fused_recurrent_gated_delta_rule]


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters_are_flas(name):
    parameters = inspect.signature(getattr(efla, name)).parameters.values()
    positional = [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
    assert positional == SIGNATURES[name].split()


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters_are_those_of_the_installed_fla(name):
    pytest.importorskip("fla", reason="flash-linear-attention is not installed")
    home = "gated_delta_rule" if "gated" in name else "delta_rule"
    try:
        module = __import__(f"fla.ops.{home}", fromlist=[name])
    except Exception as error:  # it imports triton, which may find no driver
        pytest.skip(f"fla.ops.{home} cannot be imported: {error}")
    theirs = inspect.signature(getattr(module, name)).parameters.values()
    assert [p.name for p in theirs if p.kind == p.POSITIONAL_OR_KEYWORD] == SIGNATURES[name].split()


def problem(dtype=torch.float32, **sizes):
    """Tensors, and the state under the name that fla has for it."""
    sizes = {"heads": 2, "value_heads": 4, "decay": True, **sizes}
    return inputs(dtype=dtype, **sizes)


@pytest.mark.parametrize("function", UNGATED)
@pytest.mark.parametrize("rule", ["euler", "exact"])
def test_ungated(function, rule):
    x = problem()
    arguments = [x[n] for n in ("q", "k", "v", "beta")]
    expected, state = delta_rule(*arguments, initial_state=x["initial_state"], scale=0.3, rule=rule,
                                 qk_l2norm=True)  # fmt: skip
    options = {} if rule == "euler" else {"rule": rule}
    o, final = function(*arguments, 0.3, x["initial_state"], True, True, **options)
    assert relative_error(o, expected) < 2e-5 and relative_error(final, state) < 2e-5
    o, final = function(*arguments, **options)
    assert final is None
    assert relative_error(o, delta_rule(*arguments, rule=rule)[0]) < 2e-5


@pytest.mark.parametrize("function", GATED)
@pytest.mark.parametrize("rule", ["euler", "exact", "exact_log", "linear"])
def test_gated(function, rule):
    x = problem()
    expected, state = delta_rule(**x, rule=rule)
    o, final = function(
        x["q"], x["k"], x["v"], g=x["log_decay"], beta=x["beta"], rule=rule, output_final_state=True,
        initial_state=x["initial_state"],
    )  # fmt: skip
    assert relative_error(o, expected) < 2e-5 and relative_error(final, state) < 2e-5


@pytest.mark.parametrize("function", GATED)
def test_gates_in_the_kernel(function):
    x = problem()
    raw_g, raw_beta = torch.randn(2, 19, 4), torch.randn(2, 19, 4)
    a_log, dt_bias = torch.randn(4), torch.randn(4)
    g = -a_log.double().exp() * F.softplus(raw_g.double() + dt_bias.double())
    beta = 2 * raw_beta.double().sigmoid()
    expected, _ = delta_rule(x["q"], x["k"], x["v"], beta, g, rule="euler", qk_l2norm=True)
    o, _ = function(
        x["q"], x["k"], x["v"], g=raw_g, beta=raw_beta, A_log=a_log, dt_bias=dt_bias,
        use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    assert relative_error(o, expected) < 2e-5
    g = -a_log.double().exp() * F.softplus(raw_g.double())
    expected, _ = delta_rule(x["q"], x["k"], x["v"], raw_beta.double().sigmoid(), g, rule="euler")
    o, _ = function(
        x["q"], x["k"], x["v"], g=raw_g, beta=raw_beta, A_log=a_log, use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
    )  # fmt: skip
    assert relative_error(o, expected) < 2e-5


@pytest.mark.parametrize("function", GATED)
def test_gradients_reach_the_parameters_of_the_gate(function):
    x = {n: t.double() for n, t in problem(tokens=5, key_dim=3, value_dim=2).items()}
    raw = [torch.randn(2, 5, 4).double(), torch.randn(4).double(), torch.randn(4).double()]

    def call(g, a_log, dt_bias):
        return function(
            x["q"], x["k"], x["v"], g=g, beta=x["beta"], A_log=a_log, dt_bias=dt_bias,
            use_gate_in_kernel=True,
        )[0]  # fmt: skip

    assert torch.autograd.gradcheck(call, [t.requires_grad_() for t in raw])


@pytest.mark.parametrize("function", GATED)
@pytest.mark.parametrize("name", ["state_v_first", "transpose_state_layout"])
def test_state_with_v_first(function, name):
    x = problem()
    named = dict(q=x["q"], k=x["k"], v=x["v"], g=x["log_decay"], beta=x["beta"])
    o, final = function(**named, initial_state=x["initial_state"], output_final_state=True)
    turned = x["initial_state"].transpose(-1, -2).contiguous()
    if name == "transpose_state_layout":
        with pytest.warns(DeprecationWarning, match="now called state_v_first"):
            o2, final2 = function(
                **named, initial_state=turned, output_final_state=True, **{name: True}
            )
    else:
        o2, final2 = function(
            **named, initial_state=turned, output_final_state=True, **{name: True}
        )
    assert torch.equal(o, o2) and torch.equal(final.transpose(-1, -2), final2)
    assert final2.shape == (2, 4, 6, 8) and final2.is_contiguous()


@pytest.mark.parametrize("function", UNGATED + GATED)
def test_packed(function):
    x = problem(batch=1, sequences=3)
    offsets = torch.tensor([0, 5, 5, 19])
    named = dict(q=x["q"], k=x["k"], v=x["v"], beta=x["beta"])
    if function in GATED:
        named["g"] = x["log_decay"]
    log_decay = named.get("g")
    expected, state = delta_rule(x["q"], x["k"], x["v"], x["beta"], log_decay, rule="euler",
                                 initial_state=x["initial_state"], cu_seqlens=offsets)  # fmt: skip
    o, final = function(
        **named,
        initial_state=x["initial_state"],
        output_final_state=True,
        cu_seqlens=offsets,
    )
    assert relative_error(o, expected) < 2e-5 and relative_error(final, state) < 2e-5


@pytest.mark.parametrize("function", UNGATED + GATED)
def test_types_as_fla_takes_them(function):
    x = problem(dtype=torch.bfloat16)
    sixteen = {n: t.bfloat16() for n, t in x.items()}
    named = dict(q=x["q"], k=x["k"], v=x["v"], beta=sixteen["beta"])
    if function in GATED:
        named["g"] = sixteen["log_decay"]
    o, final = function(**named, initial_state=sixteen["initial_state"], output_final_state=True)
    assert o.dtype == torch.bfloat16 and final.dtype == torch.float32
    expected, _ = delta_rule(x["q"], x["k"], x["v"], sixteen["beta"], named.get("g"), rule="euler",
                             initial_state=sixteen["initial_state"])  # fmt: skip
    assert relative_error(o, expected) < 1.5e-2
    # float32 beside float16 coefficients, which the operators themselves refuse.
    half = {n: t.half() if n in ("beta", "g") else t.float() for n, t in named.items()}
    assert function(**half)[0].dtype == torch.float32


def test_beta_is_one_where_fla_says_so():
    x = problem()
    ones = torch.ones(2, 19, 4)
    o, _ = efla.fused_recurrent_delta_rule(x["q"], x["k"], x["v"], use_qk_l2norm_in_kernel=True)
    expected, _ = delta_rule(x["q"], x["k"], x["v"], ones, rule="euler", qk_l2norm=True)
    assert relative_error(o, expected) < 2e-5
    o, _ = efla.fused_recurrent_gated_delta_rule(
        x["q"], x["k"], x["v"], use_qk_l2norm_in_kernel=True
    )
    assert relative_error(o, expected) < 2e-5


def test_what_only_steers_flas_kernels_has_no_effect():
    x = problem(batch=1)
    named = dict(q=x["q"], k=x["k"], v=x["v"], g=x["log_decay"], beta=x["beta"])
    offsets = torch.tensor([0, 7, 19])
    expected, _ = efla.chunk_gated_delta_rule(**named, cu_seqlens=offsets)
    o, _ = efla.chunk_gated_delta_rule(
        **named, cu_seqlens=offsets, cu_seqlens_cpu=offsets, chunk_indices=offsets, chunk_size=16
    )
    assert torch.equal(o, expected)


def call(function, **changes):
    x = problem(batch=1)
    named = dict(q=x["q"], k=x["k"], v=x["v"], beta=x["beta"])
    if function in GATED:
        named["g"] = x["log_decay"]
    return lambda: function(**{**named, **changes})


CHUNK, CHUNK_GATED = efla.chunk_delta_rule, efla.chunk_gated_delta_rule
RECURRENT_GATED = efla.fused_recurrent_gated_delta_rule


@pytest.mark.parametrize(
    "refused,error,match",
    [
        (call(CHUNK, head_first=False), ValueError, r"head_first is not accepted.*transpose\(1, 2"),
        (call(CHUNK_GATED, head_first=True), ValueError, "chunk_gated_delta_rule: head_first"),
        (call(RECURRENT_GATED, head_first=True), ValueError, "head_first is not accepted"),
        (call(CHUNK, chunk_size=128), ValueError, "chunk_size must be 16, 32 or 64, not 128"),
        (call(CHUNK, chunck_size=64), TypeError, "unexpected keyword argument 'chunck_size'"),
        (call(CHUNK_GATED, A_Log=None), TypeError, "unexpected keyword argument 'A_Log'"),
        (
            call(CHUNK_GATED, cp_context=object()),
            ValueError,
            "chunk_gated_delta_rule: cp_context is not supported",
        ),
        (call(RECURRENT_GATED, gk=torch.ones(1)), ValueError, "gk is not supported.*one number"),
        (call(RECURRENT_GATED, gv=torch.ones(1)), ValueError, "gv is not supported"),
        (
            call(CHUNK_GATED, use_gate_in_kernel=True),
            ValueError,
            r"requires A_log, of shape \[HV\]",
        ),
        (
            call(RECURRENT_GATED, g=None, use_gate_in_kernel=True, A_log=torch.ones(4)),
            ValueError,
            "requires g",
        ),
        (
            call(CHUNK_GATED, allow_neg_eigval=True),
            ValueError,
            "allow_neg_eigval=True requires use_beta_sigmoid_in_kernel",
        ),
        (
            call(CHUNK_GATED, state_v_first=True, transpose_state_layout=True),
            ValueError,
            "not both",
        ),
        (call(CHUNK, rule="rk3"), RuntimeError, 'unknown rule "rk3"'),
        (call(CHUNK_GATED, rule="rk4"), RuntimeError, 'rule "rk4" has no form with log_decay'),
        (call(CHUNK, k=torch.zeros(1, 19, 1, 8)), RuntimeError, "k must have the shape of q"),
        (
            call(CHUNK_GATED, v=torch.zeros(1, 19, 3, 6)),
            RuntimeError,
            "HV = 3 heads, which must be a multiple",
        ),
        (
            call(CHUNK, initial_state=torch.zeros(2, 4, 8, 6)),
            RuntimeError,
            r"initial_state must have shape \[N, HV, K, V\]",
        ),
        (
            call(CHUNK, cu_seqlens=torch.tensor([0, 20])),
            RuntimeError,
            r"cu_seqlens\[1\] = 20",
        ),
        (call(CHUNK, beta=torch.ones(1, 19, 4, device="meta")), RuntimeError, "beta is on meta"),
    ],
)  # fmt: skip
def test_bad_arguments(refused, error, match):
    with pytest.raises(error, match=match):
        refused()


def test_compiles_without_graph_breaks():
    torch._dynamo.reset()
    x = problem(tokens=5)
    function = torch.compile(efla.chunk_gated_delta_rule, fullgraph=True, backend="aot_eager")
    arguments = [x[n] for n in ("q", "k", "v", "log_decay", "beta")]
    o, _ = function(*arguments, use_beta_sigmoid_in_kernel=True, state_v_first=True)
    expected, _ = efla.chunk_gated_delta_rule(*arguments, use_beta_sigmoid_in_kernel=True)
    torch.testing.assert_close(o, expected)
