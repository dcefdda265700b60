"""What calls keep in memory. On a GPU, or with EFLA_TEST_DEVICE=cpu on the CPU."""

import contextlib
import threading

import cases
import efla
import pytest
import torch
from device_support import DEVICE, ON_GPU, family, needs_device, needs_gpu
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = needs_device
BFLOAT16 = torch.bfloat16
CHECKPOINT_TOKENS = 512  # between two states that the CPU's forward keeps


def inputs(tokens=1100, dim=64, decay=True, requires_grad=True, **sizes):
    x = cases.inputs(batch=2, tokens=tokens, heads=2, value_heads=4, key_dim=dim, value_dim=dim,
                     decay=decay, **sizes)  # fmt: skip
    x = {n: t.to(DEVICE, BFLOAT16 if n in ("q", "k", "v") else torch.float32) for n, t in x.items()}
    return {n: t.requires_grad_(requires_grad) for n, t in x.items()}


def saved_by(call):
    """The tensors that autograd keeps for the backward of call()."""
    saved = []

    def pack(t):
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = call()
    return saved, out


@pytest.mark.parametrize("op", [efla.chunk, efla.recurrent])
@pytest.mark.parametrize("strides", ["dense", "transposed heads"])
def test_training_keeps_the_inputs_and_on_the_cpu_a_state_every_512_tokens(op, strides):
    x = {n: cases.strided(t, strides) for n, t in inputs().items()}
    own = {t.untyped_storage().data_ptr() for t in x.values()}
    saved, _ = saved_by(lambda: op(**x, output_final_state=True))
    beside = [t for t in saved if t.untyped_storage().data_ptr() not in own]
    kept = sum(t.untyped_storage().nbytes() for t in beside)
    rows = 0 if ON_GPU else 2 * -(-1100 // CHECKPOINT_TOKENS)
    assert kept == rows * 4 * 64 * 64 * 4
    # Nothing twice, and each of the inputs as it was given: no copy in another dtype or layout.
    assert len(saved) == len(x) + (1 if kept or ON_GPU else 0)


def test_what_split_sequences_keep_may_be_lost():
    """Hopper keeps the parts' states in the storage of a tensor of no elements; a hook that copies saved
    tensors leaves them behind, and they are made again."""
    x = inputs(tokens=4200)

    def gradients(pack):
        sizes = []

        def keep(t):
            sizes.append(t.untyped_storage().nbytes() if t.numel() == 0 else 0)
            return pack(t)

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            o, _ = efla.chunk(**x)
        return torch.autograd.grad(o, list(x.values()), torch.ones_like(o)), sum(sizes)

    (kept, size), (lost, _) = gradients(lambda t: t), gradients(torch.clone)
    if family(BFLOAT16, 64) == "hopper":
        assert size > 0 and size % (2 * 4 * 64 * 64 * 4) == 0  # M and S of each part and head
    else:
        assert size == 0
    for name, a, b in zip(x, kept, lost):
        assert ((a - b).norm() <= 4e-3 * b.norm()).item(), name


def test_packed_sequences_keep_their_offsets_too():
    x = inputs()
    x = {n: t[:1] if n != "initial_state" else t for n, t in x.items()}
    offsets = torch.tensor([0, 600, 1100], device=DEVICE)
    own = {t.untyped_storage().data_ptr() for t in (*x.values(), offsets)}
    saved, _ = saved_by(lambda: efla.chunk(**x, cu_seqlens=offsets))
    beside = [t for t in saved if t.untyped_storage().data_ptr() not in own]
    rows = 0 if ON_GPU else -(-1100 // CHECKPOINT_TOKENS) + 2
    assert sum(t.untyped_storage().nbytes() for t in beside) == rows * 4 * 64 * 64 * 4


class Kept(TorchDispatchMode):
    """Elements of states that forward calls kept."""

    def __init__(self):
        super().__init__()
        self.elements = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.efla.chunk.default, torch.ops.efla.recurrent.default):
            with self:  # inference_mode shows the composite operator
                return func.decompose(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.efla._delta_rule_forward.default:
            self.elements.append(out[2].numel())
        return out


@pytest.mark.parametrize("op", [efla.chunk, efla.recurrent])
@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "no input needs a gradient"])
def test_inference_keeps_nothing(op, how):
    x = inputs(requires_grad=how == "no_grad")
    mode = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    with mode.get(how, contextlib.nullcontext)(), Kept() as kept:
        saved, (o, final) = saved_by(lambda: op(**x, output_final_state=True))
    assert kept.elements == [0] and not saved
    assert o.grad_fn is None and not o.requires_grad and not final.requires_grad


@needs_gpu
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_after_inference_only_the_outputs_are_allocated(mode):
    """The workspace comes from torch's allocator and has gone back."""
    x = inputs(tokens=2048, dim=128)
    with mode():
        efla.chunk(**x, output_final_state=True)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        o, final = efla.chunk(**x, output_final_state=True)
        kept = torch.cuda.memory_allocated() - before
    outputs = sum(-(-t.untyped_storage().nbytes() // 512) * 512 for t in (o, final))
    assert kept <= outputs + 512  # 512: the place of the states that are not kept


@needs_gpu
@pytest.mark.parametrize("dim", [32, 128])
def test_a_thread_that_finds_all_memory_cached(dim):
    """Such a thread, as that of a first backward may be, has made no call that gives it a CUDA context. The
    driver's encoder of tensor maps asks for one."""
    x = inputs(tokens=200, dim=dim, requires_grad=False)
    expected, found = efla.chunk(**x)[0], []
    efla.chunk(**x)  # another output's memory to the cache
    torch.cuda.synchronize()
    thread = threading.Thread(target=lambda: found.append(efla.chunk(**x)[0]))
    thread.start()
    thread.join()
    assert len(found) == 1 and torch.equal(found[0], expected)
