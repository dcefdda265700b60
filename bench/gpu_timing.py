"""Timing on a GPU: CUDA graphs over rotating inputs, contestants in turn, medians."""

import random
import statistics
import time

import torch


def first_call(run):
    """(result, seconds) of a call that may compile its kernels."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = run()
    torch.cuda.synchronize()
    return result, time.perf_counter() - start


def capture(call, count):
    """(a function that runs call(0) ... call(count - 1), "graph"), or "eager" where no graph can hold
    them."""
    here = torch.cuda.current_stream()
    side = torch.cuda.Stream()
    side.wait_stream(here)
    with torch.cuda.stream(side):
        for i in range(count):
            call(i)
    here.wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for i in range(count):
                call(i)
        graph.replay()
        torch.cuda.synchronize()
        return graph.replay, "graph"
    except Exception:  # peers that wait for the device raise all sorts of errors
        torch.cuda.set_stream(here)
        torch.cuda.synchronize()

    def eager():
        for i in range(count):
            call(i)

    return eager, "eager"


def measure(calls, count, seconds=0.25, rounds=(7, 51)):
    """{name: (median ms, fastest ms, method)} of one call each.

    calls: {name: function of i}. Every round times each of them once, in an order of its own, so that
    all see the same clocks and neighbours; `seconds` bounds the rounds of one contestant.
    """
    ready, slowest = {}, 0.0
    for name, call in calls.items():
        run, method = capture(call, count)
        ready[name] = (run, method)
        run()
        _, once = first_call(run)
        slowest = max(slowest, once)
    total = min(rounds[1], max(rounds[0], int(seconds / max(slowest, 1e-5))))
    events = {name: [] for name in ready}
    order = random.Random(0)
    for i in range(total + 2):  # two rounds to warm up
        for name in order.sample(list(ready), len(ready)):
            run, _ = ready[name]
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            if i >= 2:
                events[name].append((begin, end))
    torch.cuda.synchronize()
    out = {}
    for name, pairs in events.items():
        times = [begin.elapsed_time(end) / count for begin, end in pairs]
        out[name] = (statistics.median(times), min(times), ready[name][1])
    return out


def copy_bandwidth():
    """Bytes read and written per second by a kernel that reads 2 GiB and writes as many. (In a graph
    copy_() would be done by a copy engine, at two thirds of that.)"""
    source = torch.ones(1 << 29, device="cuda")
    target = torch.empty_like(source)
    times = measure({"copy": lambda i: torch.neg(source, out=target)}, 1)
    return 2 * source.nbytes / (times["copy"][0] * 1e-3)


def peak_memory(run, before):
    """MiB in use at the worst moment of run(), above `before` bytes."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
