#!/usr/bin/env python3
"""Peers of the CPU operators, timed like `efla bench op` times ours: in turn with torch's SGEMM.

  MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=2147483647 MALLOC_TOP_PAD_=268435456 \\
      python bench/peers_cpu.py [--threads 2] [--rounds 9] [--ggml DIR] [--efla]

transformers' chunked fallback in torch needs `pip install transformers`; llama.cpp's operator needs
--ggml, a folder with libggml-base.so and libggml-cpu.so; --efla adds our operator through the Python
package. What is not there is left out with a word on stderr. A slice of every peer's output is
compared with the recurrence in double precision before the peer is timed; a peer that computes
something else ends the program. A row marked "disturbed" had fewer than half of its rounds quiet.
Shapes and FLOP counts are those of `efla bench op`. The environment variables keep page faults of
large results out of the times.
"""

import argparse
import ctypes
import os
import statistics
import sys
import time

import torch

FORWARD = [(1, 2048, 16, 128), (1, 2048, 4, 128), (4, 512, 4, 64), (8, 2048, 8, 128)]
BACKWARD = [(1, 2048, 16, 128), (1, 2048, 4, 128)]
STEP = [(1, 1, 16, 128), (8, 1, 16, 128)]


def forward_flops(case):
    batch, tokens, heads, dim = case
    return batch * tokens * heads * (6 * dim * dim + 8 * 64 * dim)


def seconds(f):
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def measure_paired(operation, yardstick, rounds, tolerance=0.10):
    """(operation, yardstick, ratio, "kept/rounds [disturbed]"): the algorithm of efla/cli/measure.h."""
    operation()
    yardstick()
    yard, times = [seconds(yardstick)], []
    for _ in range(rounds):
        times.append(seconds(operation))
        yard.append(seconds(yardstick))
    limit = min(yard) * (1 + tolerance)
    order = sorted(range(rounds), key=lambda i: max(yard[i], yard[i + 1]))
    kept = [i for n, i in enumerate(order) if n < 3 or max(yard[i], yard[i + 1]) <= limit]
    quiet = sum(max(yard[i], yard[i + 1]) <= limit for i in order)
    disturbed = quiet < 3 or 2 * quiet < rounds
    near = {i: (yard[i] + yard[i + 1]) / 2 for i in kept}
    return (
        statistics.median(times[i] for i in kept),
        statistics.median(near.values()),
        statistics.median(near[i] / times[i] for i in kept),
        f"{len(kept)}/{rounds}" + (" disturbed" if disturbed else ""),
    )


class Table:
    def __init__(self, rounds):
        self.rounds = rounds
        self.a, self.b, self.c = (torch.randn(2048, 2048) for _ in range(3))
        print("| peer | operation | (B,T,H,D) | ms | rate | yardstick | ratio | rounds kept |")
        print("|---|---|---|---|---|---|---|---|", flush=True)

    def gemm_row(self, peer, name, case, factor, run):
        flops, gemm = factor * forward_flops(case), 2 * 2048**3
        t, y, ratio, kept = measure_paired(
            run, lambda: torch.mm(self.a, self.b, out=self.c), self.rounds
        )
        self.row(peer, name, case, t, f"{flops / t / 1e9:.1f} GFLOP/s", gemm / y / 1e9,
                 ratio * flops / gemm, kept)  # fmt: skip

    def copy_row(self, peer, case, run, inner):
        batch, _, heads, dim = case
        numel = batch * heads * dim * dim
        source, target = torch.randn(2, numel // 2)
        rounds = 3 * self.rounds

        def copies():
            for _ in range(inner):
                target.copy_(source)

        t, y, ratio, kept = measure_paired(run, copies, rounds)
        size = 4 * numel  # bytes the copy moves; the step moves twice that
        self.row(peer, "step", case, t / inner, f"{2 * size * inner / t / 1e9:.1f} GB/s",
                 size * inner / y / 1e9, 2 * ratio, kept)  # fmt: skip

    @staticmethod
    def row(peer, name, case, t, rate, yard, ratio, kept):
        shape = ",".join(map(str, case))
        print(f"| {peer} | {name} | ({shape}) | {t * 1e3:.3f} | {rate} | {yard:.1f} | "
              f"{ratio * 100:.0f} % | {kept} |", flush=True)  # fmt: skip


def inputs(case):
    batch, tokens, heads, dim = case
    torch.manual_seed(1)
    q = torch.randn(batch, tokens, heads, dim)
    k = torch.randn(batch, tokens, heads, dim) / dim**0.5
    v = torch.randn(batch, tokens, heads, dim)
    beta = torch.sigmoid(torch.randn(batch, tokens, heads))
    return q, k, v, beta, torch.zeros(batch, tokens, heads)


def recurrence(q, k, v, beta, coefficient, state=None):
    """Outputs [T, H, D] of one sequence in double, token by token: S += c k (v - S^T k)^T."""
    q, k, v, beta = (x.double() for x in (q, k, v, beta))
    heads, dim = q.shape[1:]
    s = torch.zeros(heads, dim, dim).double() if state is None else state.double().clone()
    out = []
    for t in range(q.shape[0]):
        c = coefficient(beta[t], k[t].square().sum(-1))[:, None, None]
        error = v[t] - torch.einsum("hkv,hk->hv", s, k[t])
        s = s + c * torch.einsum("hk,hv->hkv", k[t], error)
        out.append(torch.einsum("hkv,hk->hv", s, q[t]) / dim**0.5)
    return torch.stack(out)


def euler(beta, square):
    return beta


def exact(beta, square):
    return -torch.expm1(-beta * square) / square


def require_same(peer, actual, tensors, coefficient, state=None):
    """Checks the first tokens and heads of the last sequence; a prefix sees nothing after it."""
    tokens, heads = min(100, actual.shape[1]), 2
    slices = [x[-1, :tokens, :heads] for x in tensors[:4]]
    start = None if state is None else state[-1, :heads]
    expected = recurrence(*slices, coefficient, start)
    actual = actual[-1, :tokens, :heads].detach().double()
    error = ((actual - expected).abs().max() / expected.abs().max()).item()
    if not error < 1e-4:
        sys.exit(f"{peer}: differs from the recurrence by {error:.1e} of the largest output")


def with_backward(operator, tensors):
    """One forward and backward of operator(*tensors) with respect to all but the gate."""
    leaves = [x.requires_grad_(True) for x in tensors[:4]]
    grad = torch.randn_like(tensors[2])
    return lambda: torch.autograd.grad(operator(*tensors), leaves, grad)


def bench_transformers(table):
    try:
        from transformers.models.qwen3_next import modeling_qwen3_next as peer
    except ImportError as error:
        print(f"transformers left out: {error}", file=sys.stderr)
        return

    def chunk(q, k, v, beta, g):
        return peer.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta)[0]

    for case in FORWARD:
        x = inputs(case)
        with torch.no_grad():
            require_same("transformers", chunk(*x), x, euler)
            table.gemm_row("transformers", "forward", case, 1, lambda x=x: chunk(*x))
    for case in BACKWARD:
        table.gemm_row("transformers", "forward+backward", case, 4,
                       with_backward(chunk, inputs(case)))  # fmt: skip
    for case in STEP:
        q, k, v, beta, g = inputs(case)
        state = torch.randn(case[0], case[2], case[3], case[3])

        def steps(q=q, k=k, v=v, beta=beta, g=g, state=state):
            for _ in range(20):
                peer.torch_recurrent_gated_delta_rule(
                    q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True
                )

        with torch.no_grad():
            out = peer.torch_recurrent_gated_delta_rule(
                q, k, v, g=g, beta=beta, initial_state=state.clone(), output_final_state=True
            )[0]
            require_same("transformers", out, (q, k, v, beta), euler, state)
            table.copy_row("transformers", case, steps, 20)


def bench_efla(table):
    try:
        import efla
    except (ImportError, OSError) as error:
        print(f"efla left out: {error}", file=sys.stderr)
        return

    def chunk(q, k, v, beta, g):
        return efla.chunk(q, k, v, beta)[0]

    for case in FORWARD:
        x = inputs(case)
        with torch.no_grad():
            require_same("efla", chunk(*x), x, exact)
            table.gemm_row("efla", "forward", case, 1, lambda x=x: chunk(*x))
    for case in BACKWARD:
        table.gemm_row("efla", "forward+backward", case, 4, with_backward(chunk, inputs(case)))
    for case in STEP:
        q, k, v, beta, _ = inputs(case)
        state = torch.randn(case[0], case[2], case[3], case[3])

        def steps(q=q, k=k, v=v, beta=beta, state=state):
            for _ in range(20):
                efla.step_(q, k, v, beta, state)

        out = efla.step_(q, k, v, beta, state.clone())
        require_same("efla", out, (q, k, v, beta), exact, state)
        table.copy_row("efla", case, steps, 20)


class Ggml:
    """ggml_gated_delta_net on the CPU back end, called through its C interface."""

    class InitParams(ctypes.Structure):
        _fields_ = [
            ("size", ctypes.c_size_t),
            ("buffer", ctypes.c_void_p),
            ("no_alloc", ctypes.c_bool),
        ]

    def __init__(self, folder, threads):
        mode = ctypes.RTLD_GLOBAL
        self.base = ctypes.CDLL(os.path.join(folder, "libggml-base.so"), mode=mode)
        self.cpu = ctypes.CDLL(os.path.join(folder, "libggml-cpu.so"), mode=mode)
        p, i64 = ctypes.c_void_p, ctypes.c_int64
        self.declare(self.base, "ggml_init", p, [self.InitParams])
        self.declare(self.base, "ggml_new_tensor_4d", p, [p, ctypes.c_int, i64, i64, i64, i64])
        self.declare(self.base, "ggml_gated_delta_net", p, [p] * 7 + [i64])
        self.declare(self.base, "ggml_new_graph", p, [p])
        self.declare(self.base, "ggml_build_forward_expand", None, [p, p])
        self.declare(self.base, "ggml_get_data_f32", p, [p])
        self.declare(self.base, "ggml_free", None, [p])
        self.declare(self.cpu, "ggml_backend_cpu_init", p, [])
        self.declare(self.cpu, "ggml_backend_cpu_set_n_threads", None, [p, ctypes.c_int])
        self.declare(self.cpu, "ggml_backend_cpu_set_threadpool", None, [p, p])
        self.declare(self.base, "ggml_backend_graph_compute", ctypes.c_int, [p, p])
        self.declare(self.base, "ggml_threadpool_params_default", self.PoolParams, [ctypes.c_int])
        self.declare(self.cpu, "ggml_threadpool_new", p, [ctypes.POINTER(self.PoolParams)])
        self.backend = self.cpu.ggml_backend_cpu_init()
        self.cpu.ggml_backend_cpu_set_n_threads(self.backend, threads)
        # A pool of its own: without one ggml starts and joins its threads in every call.
        self.pool_params = self.base.ggml_threadpool_params_default(threads)
        self.pool = self.cpu.ggml_threadpool_new(ctypes.byref(self.pool_params))
        self.cpu.ggml_backend_cpu_set_threadpool(self.backend, self.pool)

    class PoolParams(ctypes.Structure):
        _fields_ = [
            ("cpumask", ctypes.c_bool * 512),
            ("n_threads", ctypes.c_int),
            ("prio", ctypes.c_int),
            ("poll", ctypes.c_uint32),
            ("strict_cpu", ctypes.c_bool),
            ("paused", ctypes.c_bool),
        ]

    @staticmethod
    def declare(library, name, result, arguments):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments

    def operator(self, case):
        """(a call that runs the operator on `case`, its context to free)."""
        batch, tokens, heads, dim = case
        values = inputs(case)
        state = torch.zeros(batch, heads, dim, dim)
        size = 4 * (5 * values[0].numel() + 3 * state.numel()) + (1 << 22)
        context = self.base.ggml_init(self.InitParams(size, None, False))

        def tensor(x, *shape):
            t = self.base.ggml_new_tensor_4d(context, 0, *shape)  # 0: float32
            ctypes.memmove(self.base.ggml_get_data_f32(t), x.data_ptr(), 4 * x.numel())
            return t

        q, k, v = (tensor(x, dim, heads, tokens, batch) for x in values[:3])
        beta, g = (tensor(x, 1, heads, tokens, batch) for x in values[3:])
        s = tensor(state, dim, dim, heads, batch)
        out = self.base.ggml_gated_delta_net(context, q, k, v, g, beta, s, 1)
        graph = self.base.ggml_new_graph(context)
        self.base.ggml_build_forward_expand(graph, out)

        def run():
            return self.base.ggml_backend_graph_compute(self.backend, graph)

        # The result holds the outputs [B, T, H, D] and, behind them, the states.
        run()
        memory = (ctypes.c_float * values[2].numel()).from_address(self.base.ggml_get_data_f32(out))
        output = torch.frombuffer(memory, dtype=torch.float32)
        require_same("llama.cpp", output.view(batch, tokens, heads, dim), values, euler)
        return run, context

    def bench(self, table):
        for case in FORWARD:
            run, context = self.operator(case)
            table.gemm_row("llama.cpp", "forward", case, 1, run)
            self.base.ggml_free(context)
        for case in STEP:
            run, context = self.operator(case)
            table.copy_row("llama.cpp", case, lambda run=run: [run() for _ in range(20)], 20)
            self.base.ggml_free(context)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ggml", metavar="DIR", help="folder with libggml-base.so, libggml-cpu.so")
    parser.add_argument("--efla", action="store_true", help="also time the efla Python package")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tuned = "tuned" if "MALLOC_TRIM_THRESHOLD_" in os.environ else "default"
    print(f"threads {arguments.threads}, float32, {tuned} malloc, torch {torch.__version__}\n")
    table = Table(arguments.rounds)
    bench_transformers(table)
    if arguments.ggml:
        Ggml(arguments.ggml, arguments.threads).bench(table)
    if arguments.efla:
        bench_efla(table)


if __name__ == "__main__":
    main()
