"""Bad arguments of chunk, recurrent and the package: what the message must say."""

import os
import subprocess
import sys
from pathlib import Path

import efla
import pytest
import torch
from cases import inputs


def arguments(**changes):
    case = inputs(decay=True)
    case.update(changes)
    return case


X = torch.zeros
BAD = [
    (dict(q=X(2, 19, 16)), r"q must have shape \[B, T, H, K\], but has shape \[2, 19, 16\]"),
    (dict(q=X(2, 19, 2, 8, dtype=torch.int32)), "q must be float32"),
    (dict(k=X(2, 19, 2, 7)), r"k must have the shape of q, \[2, 19, 2, 8\].*\[2, 19, 2, 7\]"),
    (dict(k=X(2, 18, 2, 8)), "k must have the shape of q"),
    (dict(k=X(2, 19, 2, 8).double()), r"k must have the dtype of q, Float, but is Double.*\[2, 19"),
    (dict(v=X(2, 19, 2, 6).bfloat16()), "v must have the dtype of q, Float, but is BFloat16"),
    (dict(v=X(2, 20, 2, 6)), r"v must have shape.*\[2, 20, 2, 6\]"),
    (dict(v=X(2, 19, 3, 6)), "HV = 3 heads, which must be a multiple of the H = 2"),
    (dict(v=X(2, 19, 2, 600)), "V may be at most 512"),
    (dict(v=X(2, 19, 2, 0)), "HV >= 1 and V >= 1"),
    (dict(beta=X(2, 19, 1)), r"beta must have shape \[B, T, HV\] = \[2, 19, 2\].*\[2, 19, 1\]"),
    (dict(beta=X(2, 19, 2, 1)), "beta must have shape"),
    (dict(beta=X(2, 19, 2).bfloat16()), "beta must be float32 or have the dtype of q"),
    (dict(beta=X(2, 19, 2, dtype=torch.int64)), "beta must be float32"),
    (dict(log_decay=X(2, 19, 3)), "log_decay must have shape"),
    (
        dict(initial_state=X(1, 2, 8, 6)),
        r"initial_state must have shape \[N, HV, K, V\] = \[2, 2, 8, 6\]",
    ),
    (dict(initial_state=X(2, 2, 8, 6).bfloat16()), "initial_state must be Float"),
    (dict(rule="heun"), 'unknown rule "heun"; rules are linear, euler, rk2, rk4, exact, exact_log'),
    (dict(rule="rk2"), 'rule "rk2" has no form with log_decay'),
    (dict(rule="rk4"), 'rule "rk4" has no form with log_decay'),
    (dict(scale=float("inf")), "scale must be finite"),
    (dict(scale=1e39), r"scale must be finite in the arithmetic of q, float32, but is 1e\+39"),
    (dict(cu_seqlens=torch.tensor([0, 19])), "the batch must be 1"),
    (dict(k=X(2, 19, 2, 8, device="meta")), "k is on meta"),
    (dict(initial_state=X(2, 2, 8, 6, device="meta")), "initial_state is on meta"),
]


@pytest.mark.parametrize("op", [efla.chunk, efla.recurrent])
@pytest.mark.parametrize("changes,match", BAD)
def test_bad_arguments_are_named(op, changes, match):
    with pytest.raises(RuntimeError, match=match):
        op(**arguments(**changes))
    with pytest.raises(RuntimeError, match=f"efla::{op.__name__}: "):
        op(**arguments(**changes))


@pytest.mark.parametrize(
    "offsets,match",
    [
        ([0, 20], r"\[0, T = 19\], but cu_seqlens\[1\] = 20"),
        ([0, 9, 8, 19], r"cu_seqlens\[2\] = 8 after 9"),
        ([-1, 19], r"cu_seqlens\[0\] = -1"),
        ([], r"must have shape \[N \+ 1\]"),
        ([[0, 19]], r"must have shape \[N \+ 1\]"),
    ],
)
@pytest.mark.parametrize("op", [efla.chunk, efla.recurrent])
def test_bad_offsets(op, offsets, match):
    case = inputs(batch=1)
    case["initial_state"] = None
    with pytest.raises(RuntimeError, match=match):
        op(**case, cu_seqlens=torch.tensor(offsets, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="cu_seqlens must be int32 or int64"):
        op(**case, cu_seqlens=torch.tensor([0.0, 19.0]))


def test_float64_takes_a_scale_beyond_float32():
    case = {k: None if t is None else t.double() for k, t in inputs().items()}
    o, _ = efla.recurrent(**case, scale=1e39)
    torch.testing.assert_close(o * 1e-39, efla.recurrent(**case, scale=1.0)[0])


DUALS = {
    "chunk": lambda x: efla.chunk(x, x, x, x[..., 0]),
    "recurrent": lambda x: efla.recurrent(x.detach(), x.detach(), x, x[..., 0].detach()),
    "step_": lambda x: efla.step_(x, x, x, x[..., 0], torch.zeros(1, 2, 4, 4)),
    "state of step_": lambda x: efla.step_(
        *[torch.ones(3, 2, 4)] * 3, torch.ones(3, 2), x[0, ..., None] * torch.ones(4)
    ),
    "short_conv": lambda x: efla.short_conv(x[:, 0], torch.ones(4, 3)),
    "rms_norm": lambda x: efla.rms_norm(x.detach(), None, 1e-6, x),
    "swiglu": lambda x: efla.swiglu(x.detach(), x),
}


@pytest.mark.parametrize("name", DUALS)
@pytest.mark.parametrize("grad_mode", [True, False])
def test_forward_mode_is_refused_and_the_tangent_not_dropped(name, grad_mode):
    ones = torch.ones(1, 3, 2, 4)
    with torch.autograd.forward_ad.dual_level(), torch.set_grad_enabled(grad_mode):
        dual = torch.autograd.forward_ad.make_dual(ones, ones)
        with pytest.raises(RuntimeError, match="forward-mode differentiation is not implemented"):
            DUALS[name](dual)
    with pytest.raises(RuntimeError, match="forward-mode differentiation is not implemented"):
        torch.func.jvp(DUALS[name], (ones,), (ones,))


def test_unknown_keywords_and_missing_arguments():
    case = inputs()
    with pytest.raises(TypeError, match="chunk_size"):
        efla.chunk(**case, chunk_size=32)
    with pytest.raises(TypeError, match="beta"):
        efla.chunk(case["q"], case["k"], case["v"])
    with pytest.raises(RuntimeError, match="rule"):
        efla.chunk(**case, rule=3)
    with pytest.raises(TypeError):
        efla.chunk(case["q"], case["k"], case["v"], case["beta"], None, "euler")


def test_a_device_without_kernels_is_named():
    # A FakeTensor can claim any device, whatever this machine has.
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(1, 3, 2, 8, device="xpu")
        beta = torch.empty(1, 3, 2, device="xpu")
        with pytest.raises(RuntimeError, match="no kernels for that device"):
            efla.chunk(q, q, q, beta)
        with pytest.raises(RuntimeError, match="no kernels for that device"):
            efla.step_(q, q, q, beta, torch.empty(1, 2, 8, 8, device="xpu"))
        with pytest.raises(RuntimeError, match="no kernels for that device"):
            efla.swiglu(q, q)


def run_python(code, tmp_path, **environment):
    env = {k: v for k, v in os.environ.items() if k != "EFLA_LIBRARY"}
    env.update(environment)
    return subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True
    )


def test_a_missing_library_says_what_to_do(tmp_path):
    missing = run_python("import efla", tmp_path, EFLA_LIBRARY=str(tmp_path / "none.so"))
    assert missing.returncode == 1
    assert "ImportError" in missing.stderr and str(tmp_path / "none.so") in missing.stderr
    package = tmp_path / "python" / "efla"
    package.mkdir(parents=True)
    for source in Path(efla.__file__).parent.glob("*.py"):
        (package / source.name).write_text(source.read_text())
    nowhere = run_python("import efla", tmp_path, PYTHONPATH=str(tmp_path / "python"))
    assert nowhere.returncode == 1
    assert "libefla_ops.so was found neither" in nowhere.stderr
    for age, name in enumerate(["newest", "release", "oldest"]):
        built = tmp_path / "build" / name / "efla" / "ops" / "libefla_ops.so"
        built.parent.mkdir(parents=True)
        built.touch()
        os.utime(built, (2e9 - age, 2e9 - age))
    code = "import _library; print(_library.find_library())"
    for name in ("release", "newest"):
        found = run_python(code, tmp_path, PYTHONPATH=str(package))
        assert found.stdout.split("/")[-4:-3] == [name], found.stderr
        (tmp_path / "build" / "release" / "efla" / "ops" / "libefla_ops.so").unlink(missing_ok=True)
    assert "scripts/build.sh" in nowhere.stderr
    (package / "libefla_ops.so").write_text("not a library")
    broken = run_python("import efla", tmp_path, PYTHONPATH=str(tmp_path / "python"))
    assert "could not be loaded" in broken.stderr and "ImportError" in broken.stderr


@pytest.mark.parametrize("op", [efla.chunk, efla.recurrent])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_exact_step_takes_the_largest_keys_of_float16(op, dtype):
    x = {n: t if t is None else t.to(dtype) for n, t in inputs(tokens=70, dtype=dtype).items()}
    x.pop("initial_state")
    x["k"] = torch.full_like(x["k"], torch.finfo(torch.float16).max) * x["k"].sign()
    leaves = [x[n].requires_grad_() for n in ("q", "k", "v", "beta")]
    o, state = op(*leaves, output_final_state=True)
    o.float().square().sum().backward()
    assert o.isfinite().all() and state.isfinite().all()
    assert all(t.grad.isfinite().all() for t in leaves)


def test_integers_have_no_gradients_and_offsets_their_own_device():
    with pytest.raises(RuntimeError, match="[Oo]nly.*floating point.*can require gradients"):
        torch.ones(1, 3, 1, 2, dtype=torch.int64, requires_grad=True)
    x = {n: t for n, t in inputs(batch=1).items() if n not in ("initial_state", "log_decay")}
    offsets = torch.tensor([0, 19], device="meta")
    with pytest.raises(RuntimeError, match="cu_seqlens is on meta"):
        efla.chunk(**x, cu_seqlens=offsets)
    with pytest.raises(RuntimeError, match="state is on meta"):
        token = {n: t[:, 0] for n, t in x.items()}
        efla.step_(**token, state=torch.zeros(1, 2, 8, 6, device="meta"))
