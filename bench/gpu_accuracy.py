#!/usr/bin/env python3
"""Errors of the operators in bfloat16, ours and flash-linear-attention's, against float64, as Markdown.

  python bench/gpu_accuracy.py [--dims 64,128] [--tokens 4096] [--peers fla]

Rule euler, which is what fla's chunk_delta_rule computes, on inputs that are hard for it: the relative RMS
difference of outputs, final state and every gradient from our float64 operator on the CPU, on the same
rounded inputs. fla's kernels run in the first of their configurations (each compiles once per head size, a
minute or two; --autotune tries them all), which changes no rounding. With EFLA_CUDA_KERNELS=portable our
line is that of the portable kernels.
"""

import argparse
import datetime
import os
import sys

import efla
import torch
from gpu_contestants import versions

NAMES = ("o", "final state", "dq", "dk", "dv", "dbeta", "d initial state")


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


def plain(x, noise):
    x["k"] = unit(x["k"])


def near_duplicate_keys(x, noise):
    x["k"] = unit(unit(x["k"][:, :1]) + 1e-3 * unit(x["k"]))


def identical_keys(x, noise):
    x["k"] = unit(x["k"][:, :1]).expand_as(x["k"])


def key_norms_with_small_steps(x, noise):
    """|k| from e^-6 to e^6, and beta over |k|^2: the step that a unit key would make."""
    x["k"] = unit(x["k"]) * torch.exp(12 * noise - 6)[..., None]
    x["beta"] = x["beta"] / x["k"].square().sum(-1)


CASES = {
    "keys of norm 1": plain,
    "near-duplicate keys": near_duplicate_keys,
    "identical keys": identical_keys,
    "key norms e^-6 .. e^6": key_norms_with_small_steps,
}


def problem(tokens, heads, dim, change):
    """Inputs and incoming gradients, float64 numbers that the operators' types hold exactly."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    rows, state = (1, tokens, heads, dim), (1, heads, dim, dim)
    x = {"q": normal(*rows), "k": normal(*rows), "v": normal(*rows)}
    x["beta"] = normal(*rows[:3]).sigmoid()
    x["initial_state"], x["grad_o"], x["grad_state"] = normal(*state), normal(*rows), normal(*state)
    change(x, torch.rand(rows[:3], generator=g, dtype=torch.float64))
    stored = {"q", "k", "v", "grad_o"}
    return {
        n: t.to(torch.bfloat16 if n in stored else torch.float32).double() for n, t in x.items()
    }


def evaluate(op, x, device, dtype):
    """Outputs and gradients in the order of NAMES."""
    single = torch.float64 if dtype == torch.float64 else torch.float32
    types = {"q": dtype, "k": dtype, "v": dtype, "grad_o": dtype}
    x = {n: t.to(device, types.get(n, single), copy=True) for n, t in x.items()}
    leaves = [x[n].requires_grad_() for n in ("q", "k", "v", "beta", "initial_state")]
    outputs = op(*leaves)
    grads = torch.autograd.grad(outputs, leaves, [x["grad_o"], x["grad_state"]])
    return [t.detach().double().cpu() for t in (*outputs, *grads)]


def ours(q, k, v, beta, state):
    return efla.chunk(q, k, v, beta, rule="euler", initial_state=state, output_final_state=True)


def load_fla(autotune):
    """fla's operator; None if it is not installed."""
    if not autotune:
        os.environ["FLA_CACHE_RESULTS"] = "0"  # the choice below is for this run only
    try:
        import triton.runtime.autotuner
        from fla.ops.delta_rule import chunk_delta_rule
    except ImportError as error:
        print(f"fla is left out: {error}", file=sys.stderr)
        return None
    if not autotune:
        triton.runtime.autotuner.Autotuner._bench = lambda self, *args, **meta: [1.0, 1.0, 1.0]

    def op(q, k, v, beta, state):
        return chunk_delta_rule(q, k, v, beta, initial_state=state, output_final_state=True)

    return op


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dims", default="64,128", help="head sizes")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--peers", default="fla", help="'' for none")
    parser.add_argument("--autotune", action="store_true", help="let fla choose configurations")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu_accuracy: no CUDA device here")
    kernels = os.environ.get("EFLA_CUDA_KERNELS", "")
    contestants = {"efla" + (f" ({kernels})" if kernels else ""): ours}
    if "fla" in arguments.peers.split(",") and (fla := load_fla(arguments.autotune)) is not None:
        contestants["fla"] = fla

    where = torch.cuda.get_device_name() if arguments.device == "cuda" else arguments.device
    print(
        f"{where}, {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}, "
        + ", ".join(f"{n} {v}" for n, v in versions().items())
    )
    print(
        f"B = 1, T = {arguments.tokens}, H = {arguments.heads}, K = V = D, bfloat16, rule euler.\n"
    )
    print(f"| D | inputs | | {' | '.join(NAMES)} |")
    print("|---|---|---|" + "---|" * len(NAMES))
    for dim in (int(d) for d in arguments.dims.split(",")):
        for case, change in CASES.items():
            x = problem(arguments.tokens, arguments.heads, dim, change)
            expected = evaluate(ours, x, "cpu", torch.float64)
            for name, op in contestants.items():
                found = evaluate(op, x, arguments.device, torch.bfloat16)
                errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found, expected)]
                cells = " | ".join(f"{e:.1e}" for e in errors)
                print(f"| {dim} | {case} | {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
