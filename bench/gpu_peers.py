#!/usr/bin/env python3
"""Our GPU operators beside the fastest public ones, in one run on one machine.

  python bench/gpu_peers.py --csv rows.csv [--peers fla,flashqla,flashinfer] [--tables operator,...]
  python bench/gpu_report.py rows.csv [--picture docs/images/gpu-operator.png]     # anywhere

Tables: operator (forward for inference; forward + backward), variants (exact beside euler, gated rules,
packed documents of mixed length beside equal ones), heads (other head sizes, float32), decode, memory, first
(seconds of the first calls in a fresh process). Peers that cannot be imported are left out with a word on
stderr: fla (fla-core), FlashQLA (flash-qla, tilelang), FlashInfer (flashinfer-python, nvidia-cutlass-dsl).

Every row is checked before it is timed: a slice of the outputs, and of the gradients, against the
recurrence in float64 on the CPU on the same rounded inputs. A contestant that is off by more than 2e-2 is
named and not timed. Times are medians of CUDA-graph replays (plain calls where a peer cannot be captured:
"eager") over several sets of inputs in rotation, with the contestants in turn. The CSV grows row by row; with
--budget no new row begins after so many seconds.

fla and FlashQLA compile for minutes, anew for each head count and size. Where that time is scarce, let
processes side by side fill their caches on disk first (and note how long their first calls take), each with a
part of it:

  FLA_CACHE_RESULTS=0 python bench/gpu_peers.py --peers fla --compile 8x1024x32x128 --csv compile_fla_32.csv
"""

import argparse
import csv
import datetime
import importlib
import json
import os
import subprocess
import sys
import time

import torch
from gpu_contestants import (
    DecodeInputs,
    Inputs,
    Ours,
    Recompute,
    RoundedState,
    find_peers,
    versions,
)
from gpu_timing import copy_bandwidth, first_call, measure, peak_memory

DEVICE = "cuda"
# (B, T, H), those of one head count together: the peers compile anew for each.
OPERATOR = [
    (1, 32768, 32), (4, 8192, 32), (8, 4096, 32), (1, 8192, 32), (8, 1024, 32),
    (1, 32768, 16), (8, 4096, 16), (8, 2048, 16),
    (16, 2048, 8), (1, 32768, 8), (1, 131072, 8),
]  # fmt: skip
# (B, T, H, K = V, dtype)
HEADS = [
    (4, 4096, 32, 32, torch.bfloat16), (4, 4096, 32, 64, torch.bfloat16),
    (4, 4096, 16, 96, torch.bfloat16), (4, 4096, 8, 256, torch.bfloat16),
    (4, 2048, 16, 64, torch.float32), (4, 2048, 16, 128, torch.float32),
]  # fmt: skip
DECODE = (1, 8, 64, 256, 1024)
DECODE_HEADS = 16
# Documents that a packed batch of 32,768 tokens holds.
MIXED = [8192, 96, 5000, 1024, 301, 2048, 4096, 640, 3000, 128, 1777, 512, 2500, 64, 1390, 2000]
TORCH_GRAD = "torch's own first autograd.grad"  # a row of table first
TOLERANCE = 2e-2  # relative RMS in bfloat16; ours has tests with tighter limits
CHECKED_TOKENS = 128
FIELDS = ("table", "batch", "tokens", "heads", "dim", "dtype", "layout", "pass", "contestant", "ms",
          "fastest_ms", "method", "error", "peak_mib", "first_s")  # fmt: skip


def make_inputs(batch, tokens, heads, dim, dtype=torch.bfloat16, lengths=None, seed=0):
    g = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, device=DEVICE)

    shape = (batch, tokens, heads, dim)
    k = normal(*shape)
    offsets = None
    if lengths is not None:
        offsets = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    return Inputs(
        q=normal(*shape).to(dtype),
        k=k.div_(k.norm(dim=-1, keepdim=True)).to(dtype),
        v=normal(*shape).to(dtype),
        beta=normal(*shape[:3]).sigmoid_(),
        log_decay=-0.1 * torch.rand(shape[:3], generator=g, device=DEVICE),
        grad_o=normal(*shape).to(dtype),
        cu_seqlens=offsets,
        zero_decay=torch.zeros(shape[:3], device=DEVICE),
    )


def relative_rms(found, expected):
    found = found.double().cpu()
    return ((found - expected).norm() / expected.norm()).item()


def train_step(contestant, x, grad_o=None):
    """(o, gradients of q, k, v, beta) of one forward and backward."""
    with torch.enable_grad():
        for t in x.leaves:
            t.requires_grad_(True)
        o = contestant.train(x)
        grads = torch.autograd.grad(o, x.leaves, x.grad_o if grad_o is None else grad_o)
    return o, grads


class Bench:
    def __init__(self, arguments, efla):
        self.efla, self.start, self.budget = efla, time.monotonic(), arguments.budget
        self.peers = find_peers([p for p in arguments.peers.split(",") if p])
        self.ours = [Ours(efla, "exact"), Ours(efla, "euler")]
        self.file = open(arguments.csv, "w", newline="")  # noqa: SIM115 - for all tables
        self.first_seen = set()

    def head(self, text):
        self.file.write("".join(f"# {line}\n" for line in text.splitlines()))
        self.rows = csv.DictWriter(self.file, FIELDS, restval="")
        self.rows.writeheader()

    def over_budget(self):
        return time.monotonic() - self.start > self.budget

    def write(self, **row):
        self.rows.writerow(row)
        self.file.flush()
        text = " ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values())
        print(f"{time.monotonic() - self.start:6.1f} s  {text}", flush=True)

    def reference(self, contestant, x, grad_o):
        """(o, gradients, where) of the first tokens of one sequence and two heads, float64."""
        row = 0 if x.cu_seqlens is not None else x.q.shape[0] - 1
        end = x.q.shape[1] if x.cu_seqlens is None else int(x.cu_seqlens[1])
        tokens = min(end, CHECKED_TOKENS)
        heads = [0, x.q.shape[2] - 1]

        def pick(t):
            return t.detach()[row : row + 1, :tokens][:, :, heads].double().cpu()

        leaves = [pick(t).requires_grad_() for t in x.leaves]
        gated = getattr(contestant, "gated", False)
        decay = pick(x.log_decay) if gated else None
        rule = getattr(contestant, "rule", "euler")
        with torch.enable_grad():
            o, _ = self.efla.chunk(*leaves, decay, rule=rule)
            grads = torch.autograd.grad(o, leaves, pick(grad_o))
        return pick, o.detach(), grads

    def check(self, contestant, x, train):
        """(error, seconds of the first call), or None after saying what is wrong."""
        grad_o = torch.zeros_like(x.grad_o)  # gradients beyond the slice are zero, so that it is alone
        row = slice(0, 1) if x.cu_seqlens is not None else slice(-1, None)
        grad_o[row, :CHECKED_TOKENS] = x.grad_o[row, :CHECKED_TOKENS]
        if x.cu_seqlens is not None:
            grad_o[:, int(x.cu_seqlens[1]) :] = 0
        try:
            if train:
                (o, grads), seconds = first_call(lambda: train_step(contestant, x, grad_o))
            else:
                o, seconds = first_call(lambda: contestant.forward(x))
            pick, o_ref, grads_ref = self.reference(contestant, x, grad_o)
            errors = [relative_rms(pick(o), o_ref)]
            if train:
                errors += [relative_rms(pick(t), ref) for t, ref in zip(grads, grads_ref)]
        except Exception as error:  # a peer may refuse a shape in any way
            first_line = str(error).strip().splitlines()[:1]
            print(f"{contestant.name}: {type(error).__name__}: {first_line}", file=sys.stderr)
            torch.cuda.synchronize()
            return None
        if not max(errors) <= TOLERANCE:
            print(f"{contestant.name}: wrong, relative RMS {errors}", file=sys.stderr)
            return None
        return max(errors), seconds

    def row(self, table, contestants, shape, lengths=None, dtype=torch.bfloat16, layout="dense"):
        """Times all contestants on one shape (B, T, H, D), forward and forward + backward."""
        sets = [make_inputs(*shape, dtype=dtype, lengths=lengths)]
        while len(sets) < 2 or sum(x.bytes() for x in sets) < 256 << 20:
            sets.append(make_inputs(*shape, dtype=dtype, lengths=lengths, seed=len(sets)))
        names = dict(zip(("batch", "tokens", "heads", "dim"), shape), layout=layout)
        names |= dict(table=table, dtype=str(dtype).removeprefix("torch."))
        for train in (False, True):
            checked, calls = {}, {}
            for c in contestants:
                if (train and c.train is None) or c.takes(sets[0]):
                    continue
                with torch.no_grad():
                    result = self.check(c, sets[0], train)
                if result is None:
                    continue
                checked[c.name] = result
                if train:
                    calls[c.name] = lambda i, c=c: train_step(c, sets[i])
                else:
                    calls[c.name] = lambda i, c=c: c.forward(sets[i])
            with torch.no_grad():
                times = measure(calls, len(sets)) if calls else {}
            for name, (ms, fastest, method) in times.items():
                error, seconds = checked[name]
                self.write(
                    **names, **{"pass": "forward+backward" if train else "forward"},
                    contestant=name, ms=ms, fastest_ms=fastest, method=method, error=error,
                    first_s=seconds,
                )  # fmt: skip
        sets.clear()
        torch.cuda.empty_cache()

    def operator(self, shapes, peer_heads):
        for batch, tokens, heads in shapes:
            if self.over_budget():
                return
            peers = self.peers if not peer_heads or heads in peer_heads else []
            self.row("operator", self.ours + peers, (batch, tokens, heads, 128))

    def variants(self):
        gated = [Ours(self.efla, rule, True) for rule in ("exact", "exact_log", "euler")]
        rules = [*self.ours, *gated]
        for shape in ((4, 8192, 32, 128), (8, 1024, 32, 128), (1, 32768, 8, 128)):
            if self.over_budget():
                return
            self.row("variants", rules, shape)
        tokens = sum(MIXED)
        exact = self.ours[:1]
        for dim in (128, 64):
            if self.over_budget():
                return
            equal = [tokens // len(MIXED)] * len(MIXED)
            self.row("variants", exact, (len(MIXED), equal[0], 32, dim))
            self.row("variants", exact, (1, tokens, 32, dim), equal, layout="packed, equal")
            self.row("variants", exact, (1, tokens, 32, dim), MIXED, layout="packed, mixed")

    def heads(self):
        fla = [c for c in self.peers if c.name == "fla"]
        for *shape, dtype in HEADS:
            if self.over_budget():
                return
            self.row("heads", [self.ours[0], *fla], tuple(shape), dtype=dtype)

    def decode(self):
        dim, heads = 128, DECODE_HEADS
        for batch in DECODE:
            if self.over_budget():
                return
            g = torch.Generator(DEVICE).manual_seed(batch)

            def normal(*shape, g=g):
                return torch.randn(*shape, generator=g, device=DEVICE)

            size = batch * heads * dim * dim
            count = max(2, min(100, 50_000_000 // size))
            k = normal(batch, heads, dim)
            s = DecodeInputs(
                q=normal(batch, heads, dim).bfloat16(),
                k=(k / k.norm(dim=-1, keepdim=True)).bfloat16(),
                v=normal(batch, heads, dim).bfloat16(),
                logit=normal(batch, heads).bfloat16(),
                states=[normal(batch, heads, dim, dim) for _ in range(count)],
            )
            calls, errors = {}, {}
            for c in [*self.ours, RoundedState(self.efla, "exact"), *self.peers]:
                if c.decode is None:
                    continue
                try:
                    errors[c.name] = self.check_step(c, s)
                    calls[c.name] = c.decode(s)
                except Exception as error:
                    print(f"{c.name}: decode: {type(error).__name__}: {error}", file=sys.stderr)
                    torch.cuda.synchronize()
            with torch.no_grad():
                times = measure(calls, count, seconds=0.1)
            for name, (ms, fastest, method) in times.items():
                self.write(
                    table="decode", batch=batch, tokens=1, heads=heads, dim=dim, dtype="bfloat16",
                    layout="dense", **{"pass": "step"}, contestant=name, ms=ms, fastest_ms=fastest,
                    method=method, error=errors[name],
                )  # fmt: skip
            del s, calls
            torch.cuda.empty_cache()

    def check_step(self, contestant, s):
        """Relative RMS of o of the last sequence; the states are left as they were."""
        kept = s.states[0].clone()
        state = kept[-1:]
        if getattr(contestant, "transposed_state", False):
            state = state.transpose(-1, -2)
        one = [t[-1:].double().cpu() for t in (s.q, s.k, s.v)]
        beta = s.logit[-1:].float().sigmoid().double().cpu()
        rule = getattr(contestant, "rule", "euler")
        expected = self.efla.step_(*one, beta, state.double().cpu().contiguous(), rule=rule)
        with torch.no_grad():
            error = relative_rms(contestant.decode(s)(0)[-1:], expected)
        s.states[0].copy_(kept)
        if not error <= TOLERANCE:
            raise ValueError(f"relative RMS {error:.1e}")
        return error

    def compile(self, shapes):
        """Seconds of the peers' first calls on these shapes (B, T, H, D, dtype); nothing else."""
        for *shape, dtype in shapes:
            x = make_inputs(*shape, dtype=getattr(torch, dtype))
            names = dict(zip(("batch", "tokens", "heads", "dim"), shape), dtype=dtype)
            for c in self.peers:
                if c.takes(x):
                    continue
                calls = {"forward": lambda c=c, x=x: c.forward(x)}
                if c.train is not None:
                    calls["forward+backward"] = lambda c=c, x=x: train_step(c, x)
                for name, call in calls.items():
                    try:
                        with torch.no_grad():
                            _, seconds = first_call(call)
                    except Exception as error:
                        print(f"{c.name}: {type(error).__name__}: {error}", file=sys.stderr)
                        break
                    self.write(
                        table="compile", **names, layout="dense", **{"pass": name},
                        contestant=c.name, first_s=seconds,
                    )  # fmt: skip

    def memory(self):
        shape = (4, 8192, 32, 128)
        for c in [self.ours[0], Recompute(self.efla, "exact"), *self.peers]:
            if c.train is None or self.over_budget():
                continue
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            x = make_inputs(*shape)
            if not isinstance(c, Ours) or not c.gated:
                x.log_decay = None
            if c.name != "FlashQLA":
                x.zero_decay = None
            try:
                train_step(c, x)
                peak = peak_memory(lambda c=c, x=x: train_step(c, x), before)
                ms, fastest, method = measure({"": lambda _, c=c, x=x: train_step(c, x)}, 1)[""]
                self.write(
                    table="memory", **dict(zip(("batch", "tokens", "heads", "dim"), shape)),
                    dtype="bfloat16", layout="dense", **{"pass": "forward+backward"},
                    contestant=c.name, peak_mib=peak, ms=ms, fastest_ms=fastest, method=method,
                )  # fmt: skip
            except Exception as error:
                print(f"{c.name}: memory: {type(error).__name__}: {error}", file=sys.stderr)
            del x

    def first(self):
        """Ours in a fresh process; compile() has the peers' first calls."""
        run = subprocess.run(
            [sys.executable, __file__, "--first-calls"], capture_output=True, text=True, check=False
        )
        if run.returncode != 0:
            print(f"first calls: {run.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
            return
        for name, seconds in json.loads(run.stdout.splitlines()[-1]).items():
            contestant = "torch" if name == TORCH_GRAD else "efla exact"
            self.write(
                table="first", batch=8, tokens=1024, heads=32, dim=128, dtype="bfloat16",
                layout="dense", **{"pass": name}, contestant=contestant, first_s=seconds,
            )  # fmt: skip


def first_calls():
    """Prints seconds of importing, of the first calls and of the second ones as JSON."""
    x = make_inputs(8, 1024, 32, 128)
    _, imported = first_call(lambda: __import__("efla"))
    contestant = Ours(sys.modules["efla"], "exact")
    out = {"import efla": imported}
    with torch.no_grad():
        out["forward"] = first_call(lambda: contestant.forward(x))[1]
        out["forward again"] = first_call(lambda: contestant.forward(x))[1]
    # The first torch.autograd.grad with explicit gradients imports torch.fx and sympy, nearly 500
    # modules. Here without us, so that it does not count as ours.
    y = torch.ones(1, device=DEVICE, requires_grad=True)
    out[TORCH_GRAD] = first_call(lambda: torch.autograd.grad(y * y, [y], torch.ones_like(y)))[1]
    out["forward+backward"] = first_call(lambda: train_step(contestant, x))[1]
    out["forward+backward again"] = first_call(lambda: train_step(contestant, x))[1]
    print(json.dumps(out))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--csv", default="gpu_rows.csv", help="where the rows go")
    parser.add_argument("--peers", default="fla,flashqla,flashinfer", help="'' for none")
    parser.add_argument("--tables", default="operator,variants,heads,decode,memory,first")
    parser.add_argument("--rows", default="", help="operator rows by number, e.g. 0,1,4")
    parser.add_argument("--peer-heads", default="", help="head counts on which peers run, e.g. 32")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds")
    parser.add_argument("--compile", default="", help="only compile: BxTxHxD[xdtype], comma-separated")
    parser.add_argument("--first-calls", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_peers: no CUDA device here")
    if arguments.first_calls:
        return first_calls()
    shapes = [OPERATOR[int(i)] for i in arguments.rows.split(",") if i] or OPERATOR
    efla = None if arguments.compile else importlib.import_module("efla")
    bench = Bench(arguments, efla)
    bandwidth = 0.0 if arguments.compile else copy_bandwidth()
    bench.head(
        f"command: {' '.join(os.path.basename(a) if a == arguments.csv else a for a in sys.argv)}\n"
        f"date: {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC\n"
        f"device: {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}\n"
        f"versions: {', '.join(f'{n} {v}' for n, v in versions().items())}\n"
        f"copy: {bandwidth:.4g} bytes/s"
    )
    if arguments.compile:
        shapes = [(*t.split("x"), "bfloat16")[:5] for t in arguments.compile.split(",")]
        bench.compile([(*map(int, t[:4]), t[4]) for t in shapes])
        return bench.file.close()
    heads = {int(h) for h in arguments.peer_heads.split(",") if h}
    tables = {
        "first": bench.first,
        "operator": lambda: bench.operator(shapes, heads),
        "variants": bench.variants,
        "decode": bench.decode,
        "heads": bench.heads,
        "memory": bench.memory,
    }
    wanted = arguments.tables.split(",")
    unknown = set(wanted) - set(tables)
    if unknown:
        parser.error(f"--tables: {', '.join(unknown)}: there are {', '.join(tables)}")
    for name, run in tables.items():
        if name in wanted and not bench.over_budget():
            run()
    bench.file.close()
    try:
        import gpu_report

        print(gpu_report.markdown([gpu_report.read(arguments.csv)]))
    except ImportError:
        pass


if __name__ == "__main__":
    main()
