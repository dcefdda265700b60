"""The layers and models on a GPU: values, autocast, torch.compile, CUDA graphs, devices that do not fit."""

import copy
import re

import efla
import pytest
import torch
from device_support import DEVICE, needs_device, needs_gpu
from reference import relative_error

pytestmark = needs_device

KINDS = {
    "efla": lambda **o: efla.nn.EFLA(hidden_size=128, num_heads=1, layer_idx=0, **o),
    "delta_net": lambda **o: efla.nn.EFLA(
        hidden_size=128, num_heads=2, rule="euler", qk_norm="l2", use_gate=True, layer_idx=0, **o
    ),
    "gated_efla": lambda **o: efla.nn.GatedEFLA(
        hidden_size=128, num_heads=1, num_v_heads=2, head_dim=64, expand_v=1.0, layer_idx=0, **o
    ),
}


def make(kind):
    torch.manual_seed(0)
    layer = KINDS[kind]()
    with torch.no_grad():
        for conv in (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d):
            conv.weight.mul_(2)
    return layer


def hidden(batch=2, length=200, dtype=torch.float32, device=DEVICE):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, length, 128, generator=generator).to(device, dtype)


def outputs(layer, x, **options):
    """y and every gradient of its weighted sum of squares."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = layer(x, **options)[0]
    weight = torch.linspace(0.5, 1.5, y.shape[-1], dtype=torch.float64).to(y.device, y.dtype)
    (y.square() * weight).sum().backward()
    named = {n: p.grad.clone() for n, p in layer.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **named}


def agree(found, expected, bound):
    errors = {n: relative_error(found[n].cpu(), expected[n].cpu()) for n in expected}
    assert max(errors.values()) < bound, errors


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [False, True])
def test_values_and_gradients(kind, packed):
    layer = make(kind)
    offsets = torch.tensor([0, 70, 70, 190]) if packed else None
    x = hidden(1 if packed else 2, device="cpu")
    expected = outputs(copy.deepcopy(layer).double(), x.double(), cu_seqlens=offsets)
    if packed:  # rows of no sequence: every layer may do as it likes there
        expected["y"] = expected["y"][:, :190]
    options = {"cu_seqlens": offsets.to(DEVICE) if packed else None}
    for dtype, bound in ((torch.float32, 3e-4), (torch.bfloat16, 6e-2)):
        moved = copy.deepcopy(layer).to(DEVICE, dtype)
        found = outputs(moved, x.to(DEVICE, dtype), **options)
        found["y"] = found["y"][:, : expected["y"].shape[1]]
        agree(found, expected, bound)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast(kind):
    layer = make(kind).to(DEVICE)
    expected = outputs(layer, hidden())
    with torch.autocast(DEVICE.type, torch.bfloat16):
        found = outputs(layer, hidden())
    assert found["y"].dtype == torch.bfloat16 and found["q_proj.weight"].dtype == torch.float32
    agree(found, expected, 6e-2)


@pytest.mark.parametrize("kind", ["efla", "gated_efla"])
def test_compile(kind):
    torch._dynamo.reset()
    layer = make(kind).to(DEVICE)
    compiled = torch.compile(layer, fullgraph=True)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        expected = outputs(layer, hidden())

        def through(x):
            return compiled(x)

        x = hidden().requires_grad_()
        y = through(x)[0]
    agree({"y": y}, {"y": expected["y"]}, 2e-2)
    weight = torch.linspace(0.5, 1.5, 128, dtype=torch.float64).to(DEVICE, y.dtype)
    (y.square() * weight).sum().backward()
    agree({"x": x.grad}, {"x": expected["x"]}, 2e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding(kind):
    layer, x = make(kind).to(DEVICE), hidden(length=40)
    with torch.no_grad():
        whole, cache = layer(x)[0], efla.nn.Cache()
        pieces = [layer(x[:, :33], past_key_values=cache)[0]]
        pieces += [layer(x[:, t : t + 1], past_key_values=cache)[0] for t in range(33, 40)]
    assert relative_error(torch.cat(pieces, 1), whole) < 1e-4


@needs_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_in_a_cuda_graph(kind):
    layer, x = make(kind).to(DEVICE), hidden(length=40)
    with torch.no_grad():
        expected_cache, cache = efla.nn.Cache(), efla.nn.Cache()
        for c in (expected_cache, cache):
            layer(x[:, :30], past_key_values=c)
        token = x[:, 30:31].clone()
        before = {n: t.clone() for n, t in cache.layers[0].tensors().items()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            layer(token, past_key_values=cache)  # warm-up
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, _, _ = layer(token, past_key_values=cache)
        for name, tensor in cache.layers[0].tensors().items():
            tensor.copy_(before[name])
        for t in range(30, 40):
            token.copy_(x[:, t : t + 1])
            graph.replay()
            expected = layer(x[:, t : t + 1], past_key_values=expected_cache)[0]
            assert relative_error(y, expected) < 1e-6, t


def test_a_model_generates_what_it_generates_on_the_cpu():
    pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not here")
    from efla.models import EflaConfig, EflaForCausalLM

    torch.manual_seed(0)
    config = EflaConfig(hidden_size=128, num_hidden_layers=2, num_heads=2, vocab_size=50,
                        conv_initializer_range=0.5, initializer_range=0.1,
                        attn=dict(layers=[1], num_heads=2, window_size=8))  # fmt: skip
    model = EflaForCausalLM(config).eval()
    ids = torch.randint(0, 50, (2, 20))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    options = dict(max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
    expected = model.generate(ids, attention_mask=mask, **options)
    model.to(DEVICE)
    found = model.generate(ids.to(DEVICE), attention_mask=mask.to(DEVICE), **options)
    assert torch.equal(found.cpu(), expected)


# --- Devices that do not fit -----------------------------------------------------------------------


@needs_gpu
def test_mixed_devices_are_refused():
    layer = make("efla").to(DEVICE)
    x = hidden(length=8)
    q = torch.randn(1, 8, 2, 16, device=DEVICE)
    beta = torch.rand(1, 8, 2, device=DEVICE)
    state = torch.zeros(1, 2, 16, 16, device=DEVICE)
    for call, match in (
        (lambda: efla.chunk(q, q.cpu(), q, beta), "k is on cpu"),
        (lambda: efla.chunk(q, q, q, beta.cpu()), "beta is on cpu"),
        (lambda: efla.chunk(q, q, q, beta, initial_state=state.cpu()), "initial_state is on cpu"),
        (
            lambda: efla.chunk(q.cpu(), q.cpu(), q.cpu(), beta.cpu(), initial_state=state),
            "initial_state is on cuda",
        ),
        (
            lambda: efla.step_(*[q[:, 0].cpu()] * 3, beta[:, 0].cpu(), state),
            "state is on cuda",
        ),
        (
            lambda: efla.chunk(q, q, q, beta, cu_seqlens=torch.tensor([0, 8], device="meta")),
            "cu_seqlens is on meta",
        ),
        (
            lambda: efla.chunk(*[q.cpu()] * 3, beta.cpu(),
                               cu_seqlens=torch.tensor([0, 8], device=DEVICE)),
            "cu_seqlens is on cuda",
        ),
        (lambda: efla.chunk(*[q.double()] * 3, beta.double()), "float64 has no CUDA kernel"),
        (lambda: layer(x.cpu()), "same device"),
    ):  # fmt: skip
        with pytest.raises((RuntimeError, ValueError), match=re.escape(match)):
            call()
    _, _, cache = copy.deepcopy(layer).cpu()(x.cpu(), use_cache=True)
    with pytest.raises(RuntimeError, match=r"initial_state is on cpu"):
        layer(x, past_key_values=cache)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_huge_keys_in_sixteen_bits(dtype):
    largest = torch.finfo(torch.float16).max
    k = torch.full((1, 70, 2, 64), largest, device=DEVICE, dtype=dtype).requires_grad_()
    q = torch.randn(1, 70, 2, 64).to(DEVICE, dtype).requires_grad_()
    v = torch.randn(1, 70, 2, 64).to(DEVICE, dtype).requires_grad_()
    beta = torch.rand(1, 70, 2, device=DEVICE).requires_grad_()
    o, state = efla.chunk(q, k, v, beta, output_final_state=True)
    assert o.isfinite().all() and state.isfinite().all()
    o.float().square().sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v, beta))
