"""What the tests of test_cuda_*.py share: the device, poisoned memory, evaluation and comparison.

They run on a GPU, or with EFLA_TEST_DEVICE=cpu on the CPU, where what needs CUDA (graphs, streams) is
skipped. The expectation is always the CPU operator in float64 on the same rounded inputs, which
test_delta_rule.py holds to the recurrence.
"""

import contextlib
import functools
import os
from typing import NamedTuple

import cases
import efla
import pytest
import torch

DEVICE = torch.device(os.environ.get("EFLA_TEST_DEVICE", "cuda"))
ON_GPU = DEVICE.type == "cuda"
needs_device = pytest.mark.skipif(
    ON_GPU and not torch.cuda.is_available(), reason="no CUDA device here"
)
needs_gpu = pytest.mark.skipif(
    not (ON_GPU and torch.cuda.is_available()), reason="no CUDA device here, or not asked for"
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIXTEEN_BITS = (torch.bfloat16, torch.float16)

# Relative RMS allowed: outputs and final state, gradients.
LIMITS = {
    torch.float32: (1e-5, 2e-5),
    torch.bfloat16: (4e-3, 6e-3),
    torch.float16: (2e-3, 3e-3),
}
OUTPUTS = ("o", "final_state")
STORED = ("q", "k", "v", "grad_o")  # in the storage type; the others are float32


class Wider(NamedTuple):
    """A limit in the place of LIMITS, for one kind of hard input on one family of GPU kernels."""

    inputs: tuple
    dtype: torch.dtype
    tensor: str
    family: str  # as family() has it
    limit: float
    reason: str
    only_decay: bool = False
    lost: float = 0.0  # RMS of what half cannot hold: an absolute error that is no error
    dim: int = 0  # of this head size alone, in the place of a row above; 0: of all


_BF16, _F16 = torch.bfloat16, torch.float16
_REPEATED = ("near_duplicate_keys", "identical_keys")
_CANCEL = "dR.v and dR.(S^T k), of operands rounded each on its own, nearly cancel in it"
_INVERSE = "(I + L)^-1 in bfloat16: what its rounding does to one token, the same key repeats"
_ERASED = "erasing an initial state 1000 times as large as what such keys write"
_FULL = "e |k|^2 = 1 everywhere: (I + L)^-1 is as badly conditioned as random keys make it"
_FEW = "most steps end at e^-x = 0: a few carry the gradient, and (I + L)^-1 has 11 bits here"
_SMALL_U = "u of these keys, 1e-6, is among half's subnormal numbers"

# What a delta rule of 16-bit products does not keep within LIMITS. Emulating the roundings of fla's
# bfloat16 kernels on these inputs gives 1.1e-2 to 1.5e-2 for v and 2.6e-2 to 2.8e-2 for beta where
# keys repeat, and 8.4e-3 for the final state of large keys; the limits here are below the largest of
# these.
WIDER = (
    Wider(_REPEATED, _BF16, "beta", "portable", 8e-3, _CANCEL),
    Wider(("large_keys",), _BF16, "final_state", "portable", 7e-3, _ERASED),
    Wider(_REPEATED, _BF16, "v", "hopper", 1.3e-2, _INVERSE),
    Wider(_REPEATED, _BF16, "beta", "hopper", 1.7e-2, _INVERSE),
    Wider(_REPEATED, _BF16, "final_state", "hopper", 5e-3, _INVERSE, only_decay=True),
    Wider(("large_keys",), _BF16, "o", "hopper", 4.5e-3, _ERASED),
    Wider(("large_keys",), _BF16, "final_state", "hopper", 7.5e-3, _ERASED),
    Wider(("large_steps",), _BF16, "o", "hopper", 4.5e-3, _FULL),
    Wider(("large_steps",), _BF16, "final_state", "hopper", 4.5e-3, _FULL),
    Wider(("large_steps",), _BF16, "beta", "hopper", 9e-3, _FEW),
    Wider(("wide_norms_small_steps",), _BF16, "beta", "hopper", 7e-3, _CANCEL),
    Wider(("large_keys",), _F16, "final_state", "hopper", 3e-2, _SMALL_U, only_decay=True),
    Wider(("large_keys",), _F16, "k", "hopper", 1.5e-2, _SMALL_U, only_decay=True),
    Wider(("large_keys_small_steps",), _F16, "final_state", "hopper", 7e-2, _SMALL_U, only_decay=True),
    Wider(("large_keys_small_steps",), _F16, "k", "hopper", 3.3e-3, _SMALL_U, dim=96),  # no decay
    Wider(("large_keys_small_steps",), _F16, "k", "hopper", 2e-2, _SMALL_U, only_decay=True),
    Wider(("hard_resets",), _F16, "initial_state", "hopper", 3e-3,
          "gates below e^-10 make products that half does not hold", lost=2.0**-24),
    # The same errors weigh more in the keys' gradient where K = V = 64.
    Wider(("large_keys",), _BF16, "k", "hopper", 7e-3, _ERASED, dim=64),
    Wider(("large_keys",), _F16, "k", "hopper", 3.5e-3, _SMALL_U, dim=64),
    Wider(("large_keys",), _F16, "k", "hopper", 2.2e-2, _SMALL_U, only_decay=True, dim=64),
    Wider(("large_keys_small_steps",), _F16, "k", "hopper", 5.5e-3, _SMALL_U, dim=64),
    Wider(("large_keys_small_steps",), _F16, "k", "hopper", 2.6e-2, _SMALL_U, only_decay=True, dim=64),
)  # fmt: skip

_worst = {}  # (dtype, tensor) -> (share of the limit, error, limit, where)


@contextlib.contextmanager
def poisoned_memory():
    """Every tensor that is allocated inside, workspaces included, is first filled with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def representable(x, dtype):
    """x rounded, in float64. For 16 bits to a number that bfloat16 and float16 share, so that one
    expectation serves both; float32 keeps all its digits."""
    if dtype in SIXTEEN_BITS:
        return x.to(torch.bfloat16).to(torch.float16).double()
    return x.float().double()


def problem(dtype, *, seed=0, change=None, cu_seqlens=None, decay=False, **sizes):
    """Inputs (cases.inputs) and the gradients that come in, in float64, rounded for dtype.

    `change` gets the dict of inputs before it is rounded and may change it in place.
    """
    sequences = None if cu_seqlens is None else len(cu_seqlens) - 1
    x = cases.inputs(
        **sizes, dtype=torch.float64, decay=decay, sequences=sequences, seed=seed
    )
    g = torch.Generator().manual_seed(seed + 1)
    x["grad_o"] = torch.randn(x["v"].shape, generator=g, dtype=torch.float64)
    x["grad_final_state"] = torch.randn(
        x["initial_state"].shape, generator=g, dtype=torch.float64
    )
    if change is not None:
        change(x)
    return {
        name: None if t is None else representable(t, dtype if name in STORED else torch.float32)
        for name, t in x.items()
    }


def on_device(case, dtype, device=None):
    """The tensors of a problem on the device in the types that the operator takes."""
    device = DEVICE if device is None else device
    scalars = torch.float64 if dtype == torch.float64 else torch.float32
    return {
        name: None if t is None else t.to(device, dtype if name in STORED else scalars, copy=True)
        for name, t in case.items()
    }


def evaluate(op, case, dtype, device=None, poison=True, cu_seqlens=None, **options):
    """Outputs and gradients of one call: a dict of tensors on the device."""
    tensors = on_device(case, dtype, device)
    grads = [tensors.pop("grad_o"), tensors.pop("grad_final_state")]
    leaves = {n: t.requires_grad_() for n, t in tensors.items() if t is not None}
    if cu_seqlens is not None:
        cu_seqlens = torch.as_tensor(cu_seqlens).to(grads[0].device)
    with poisoned_memory() if poison else contextlib.nullcontext():
        o, final = op(**leaves, output_final_state=True, cu_seqlens=cu_seqlens, **options)
        found = torch.autograd.grad([o, final], list(leaves.values()), grads)
    return {"o": o.detach(), "final_state": final.detach(), **dict(zip(leaves, found))}


def expectation(case, **options):
    """The same in float64 on the CPU."""
    return evaluate(efla.chunk, case, torch.float64, "cpu", poison=False, **options)


def family(dtype, dim):
    """The kernels that efla.chunk runs with K = V = dim: "hopper", "portable" or "cpu". K and V that
    differ are on Hopper if each of them would be."""
    if not ON_GPU:
        return "cpu"
    hopper = (
        torch.cuda.get_device_capability(DEVICE) == (9, 0)
        and os.environ.get("EFLA_CUDA_KERNELS", "") != "portable"
        and dtype in SIXTEEN_BITS
        and dim <= 128
        and dim % 8 == 0
    )
    return "hopper" if hopper else "portable"


def wider_limits(inputs, dtype, dim, decay):
    """{tensor: row of WIDER} for the inputs of that name."""
    return {
        row.tensor: row
        for row in WIDER
        if inputs in row.inputs
        and dtype == row.dtype
        and row.family == family(dtype, dim)
        and (decay or not row.only_decay)
        and row.dim in (0, dim)
    }


def failures(found, expected, dtype, where, slack=1.0, wider=None):
    """A line for every tensor whose relative RMS error is over its limit (NaN never passes).

    `wider` holds rows of WIDER by tensor.
    """
    lines = []
    for name, x in found.items():
        limit = slack * LIMITS[dtype][0 if name in OUTPUTS else 1]
        y = expected[name]
        assert x.shape == y.shape, (where, name)
        # What underflows float32 is no number to compare with.
        floor = 1e-30 * max(1, y.numel()) ** 0.5
        row = (wider or {}).get(name)
        if row is not None:
            limit = row.limit
            floor = max(floor, row.lost / row.limit * y.numel() ** 0.5)
        error = ((x.double().cpu() - y).norm() / y.norm().clamp_min(floor)).item()
        key = (str(dtype).removeprefix("torch."), name)
        add_rows([(*key, error / limit if error == error else 1e99, error, limit, where)])
        if not error <= limit:
            lines.append(f"{where}: {name}: relative RMS {error:.2e} > {limit:.1e}")
    return lines


def check(op, case, dtype, expected=None, where="", slack=1.0, **options):
    """One call against the expectation."""
    if expected is None:
        expected = expectation(case, **options)
    bad = failures(evaluate(op, case, dtype, **options), expected, dtype, where, slack)
    assert not bad, "\n".join(bad)


def add_rows(rows):
    """Notes errors: (dtype, tensor, share of the limit, error, limit, where)."""
    for dtype, name, share, *rest in rows:
        if share > _worst.get((dtype, name), (-1,))[0]:
            _worst[dtype, name] = (share, *rest)


def errors_as_rows():
    """What add_rows has kept, of types that pytest-xdist sends between processes."""
    return [[*key, *value] for key, value in _worst.items()]


def worst_errors():
    """Lines of a table: per dtype and tensor the error that came closest to its limit."""
    if not _worst:
        return []
    lines = [f"worst relative RMS on {DEVICE}: error / limit (where)"]
    for (dtype, name), (_, error, limit, where) in sorted(_worst.items()):
        lines.append(f"  {dtype:9} {name:14} {error:.2e} / {limit:.1e}  ({where})")
    return lines


@functools.lru_cache(maxsize=4)
def layout_problem(layout, key_dim, value_dim, decay, sixteen_bits):
    """(problem, options of the operator) of a row of cases.LAYOUTS."""
    sizes = dict(cases.LAYOUTS[layout])
    options = {"qk_l2norm": sizes.pop("qk_l2norm", False)}
    options["cu_seqlens"] = sizes.get("cu_seqlens")
    dtype = torch.bfloat16 if sixteen_bits else torch.float32
    case = problem(dtype, key_dim=key_dim, value_dim=value_dim, decay=decay, **sizes)
    return case, options
