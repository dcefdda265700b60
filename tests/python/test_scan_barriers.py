"""The barriers of the Hopper scan (efla/kernels/cuda/sm90/scan*.cuh): see barrier_model.py."""

import itertools

import pytest
from barrier_model import DeadlockError, Model, NamedBarrier, barriers

GROUPS = 2  # warpgroups of the walk
WARPS = 4


class Scan(Model):
    def __init__(
        self,
        seed,
        erase,
        decay,
        half,
        keep,
        tail,
        chunks,
        wait_twice=False,
        fences=True,
        slowest_load=20,
    ):
        super().__init__(seed)
        self.erase, self.keep, self.output, self.tail, self.chunks = (
            erase,
            keep,
            not keep,
            tail,
            chunks,
        )
        self.folded = not half and (erase or not decay) and self.output
        self.inverter_scores = erase and decay and self.output
        self.wait_twice, self.fences, self.slowest_load = wait_twice, fences, slowest_load
        self.keys, self.queries, self.values = 4 if self.output else 3, 3, 2  # buffers
        walkers = WARPS * GROUPS

        self.keys_full, self.lower_full = barriers(self.keys, 1), barriers(self.keys, WARPS)
        self.keys_free = barriers(self.keys, walkers + WARPS * (1 + self.inverter_scores))
        self.queries_full = barriers(self.queries, 1)
        self.queries_free = barriers(self.queries, (walkers if self.output else 0) + WARPS)
        self.values_full = barriers(self.values, 1)
        self.values_free = barriers(self.values, GROUPS if keep else walkers)
        self.output_full, self.output_free = barriers(GROUPS, WARPS), barriers(GROUPS, 1)
        self.lower_free, self.ready, self.scores_ready = (barriers(2, WARPS) for _ in range(3))
        self.triangles_free = barriers(2, walkers)
        self.prepare_barrier, self.invert_barrier = NamedBarrier(), NamedBarrier()
        self.walk_barriers = [NamedBarrier() for _ in range(GROUPS)]
        # What is in the buffers; those that four warps write hold a number for each.
        self.k, self.q, self.v = [None] * self.keys, [None] * self.queries, [None] * self.values
        self.scalars = [[None] * WARPS for _ in range(self.keys)]
        self.lower, self.inverse, self.scores = (
            [[None] * WARPS for _ in range(2)] for _ in range(3)
        )
        self.query_rows = [None] * 8
        self.o = [[None] * WARPS for _ in range(GROUPS)]
        self.sent = [[] for _ in range(GROUPS)]

    def run(self):
        for warp in range(WARPS):
            self.start(self.prepare(warp))
            self.start(self.invert(warp))
            for group in range(GROUPS):
                self.start(self.walk(group, warp))
        self.run_all()
        if self.output:
            assert self.sent == [list(range(self.chunks))] * GROUPS

    def feed(self, full, free, buffers, chunk):
        index, parity = self.ring(chunk, len(buffers))
        yield free[index].wait(parity ^ 1)
        self.copy(full[index], index, chunk, buffers)

    def clear_values(self, chunk):
        index, parity = self.ring(chunk, self.values)
        yield self.values_full[index].wait(parity)
        assert self.v[index] == chunk

    def prepare(self, warp):
        for c in range(self.chunks):
            (i, key_parity), (qi, query_parity) = (
                self.ring(c, self.keys),
                self.ring(c, self.queries),
            )
            j, parity = self.ring(c, 2)
            part = self.tail and c == self.chunks - 1
            yield self.keys_full[i].wait(key_parity)
            assert self.k[i] == c
            if part:
                yield self.queries_full[qi].wait(query_parity)
            if part and not self.erase:
                yield self.triangles_free[j].wait(parity ^ 1)
                yield from self.clear_values(c)
            if self.keep or part:
                yield self.prepare_barrier.sync()
            if self.erase:
                yield self.lower_free[j].wait(parity ^ 1)
            yield self.prepare_barrier.sync()
            self.scalars[i][warp] = self.query_rows[c % 8] = c
            if self.erase:
                self.lower[j][warp] = c
                yield None
                self.lower_full[i].arrive()
            else:
                yield self.triangles_free[j].wait(parity ^ 1)
                self.ready[j].arrive()
            if not self.inverter_scores:
                yield self.queries_full[qi].wait(query_parity)
                assert self.q[qi] == c
                if (self.erase and self.output) or (self.wait_twice and not self.erase):
                    yield self.triangles_free[j].wait(parity ^ 1)
                self.scores[j][warp] = c
                yield None
                self.queries_free[qi].arrive()
            assert self.k[i] == c
            self.keys_free[i].arrive()
            if self.keep:
                yield self.prepare_barrier.sync()
            elif not self.inverter_scores:
                self.scores_ready[j].arrive()

    def invert(self, warp):
        keys = self.keys_full, self.keys_free, self.k
        values = self.values_full, self.values_free, self.v
        queries = self.queries_full, self.queries_free, self.q
        if warp < 3:
            operand = (keys, values, queries)[warp]
            for c in range(min(len(operand[2]), self.chunks) if self.erase else self.chunks):
                yield from self.feed(*operand, c)
        for c in range(self.chunks if self.erase else 0):
            key, query = c - 2 + self.keys, c - 2 + self.queries
            value = c - (1 if self.folded else 2) + self.values
            if warp == 0 and c > 1 and key < self.chunks:
                yield from self.feed(*keys, key)
            if warp == 2 and c > 1 and query < self.chunks:
                yield from self.feed(*queries, query)
            if warp == 1 and self.values <= value < self.chunks:
                yield from self.feed(*values, value)
            (i, key_parity), (qi, query_parity) = (
                self.ring(c, self.keys),
                self.ring(c, self.queries),
            )
            j, parity = self.ring(c, 2)
            yield self.triangles_free[j].wait(parity ^ 1)
            yield self.lower_full[i].wait(key_parity)
            assert self.lower[j] == [c] * WARPS
            yield self.invert_barrier.sync()
            self.inverse[j][warp] = c
            yield None
            if not self.folded and self.tail and c == self.chunks - 1:
                yield from self.clear_values(c)
            self.ready[j].arrive()
            if self.inverter_scores:
                yield self.queries_full[qi].wait(query_parity)
                assert self.q[qi] == c and self.k[i] == c
                self.scores[j][warp] = c
                yield None
                self.scores_ready[j].arrive()
                self.keys_free[i].arrive()
                self.queries_free[qi].arrive()
            assert self.lower[j] == [c] * WARPS
            self.lower_free[j].arrive()
            if self.keep:
                yield self.invert_barrier.sync()

    def load(self, index, chunk, done):
        """A load that has been issued: it may be a while until it reads."""
        for _ in range(self.random.randrange(self.slowest_load)):
            yield None
        assert self.v[index] == chunk
        done.append(index)

    def read_values(self, chunk):
        """Returns what to wait for until the loads are done."""
        index, parity = self.ring(chunk, self.values)
        yield self.values_full[index].wait(parity)
        done = []
        self.start(self.load(index, chunk, done))
        return lambda: bool(done)

    def give_back(self, chunk, loaded):
        if self.fences:
            yield loaded
        self.values_free[chunk % self.values].arrive()

    def round_output(self, group, warp, chunk):
        if chunk > 0:
            yield self.output_free[group].wait(chunk % 2 ^ 1)
        assert self.query_rows[chunk % 8] == chunk
        assert self.o[group][warp] is None or self.o[group][warp] in self.sent[group]
        self.o[group][warp] = chunk

    def send_output(self, group, chunk):
        yield self.output_full[group].wait(chunk % 2)
        assert self.o[group] == [chunk] * WARPS
        yield None
        self.sent[group].append(chunk)

    def walk(self, group, warp):
        early = self.folded and self.erase
        if early:
            loaded = yield from self.read_values(0)
            yield from self.give_back(0, loaded)
        for c in range(self.chunks):
            (i, key_parity), (qi, query_parity) = (
                self.ring(c, self.keys),
                self.ring(c, self.queries),
            )
            j, parity = self.ring(c, 2)
            if early:
                yield self.lower_full[i].wait(key_parity)
            else:
                yield self.ready[j].wait(parity)
            if self.output:
                yield self.queries_full[qi].wait(query_parity)
            assert self.k[i] == c and self.scalars[i] == [c] * WARPS
            if self.keep:
                yield self.walk_barriers[group].sync()
                yield (yield from self.read_values(c))
            else:
                if c > 0:
                    yield from self.round_output(group, warp, c - 1)
                assert self.q[qi] == c
                yield None
                if c > 0:
                    self.output_full[group].arrive()
                if not early:
                    loaded = yield from self.read_values(c)
                    yield from self.give_back(c, loaded)
            if self.erase:
                if early:
                    yield self.ready[j].wait(parity)
                assert self.inverse[j] == [c] * WARPS
                if early and c + 1 < self.chunks:
                    loaded = yield from self.read_values(c + 1)
            if self.output:
                assert self.q[qi] == c
                self.queries_free[qi].arrive()
                yield self.scores_ready[j].wait(parity)
                assert self.scores[j] == [c] * WARPS
                if c > 0 and warp == 0:
                    yield from self.send_output(group, c - 1)
                if early and c + 1 < self.chunks:
                    yield from self.give_back(c + 1, loaded)
            else:
                yield self.walk_barriers[group].sync()
            yield None
            assert self.k[i] == c and self.scalars[i] == [c] * WARPS
            assert not self.erase or self.inverse[j] == [c] * WARPS
            self.keys_free[i].arrive()
            self.triangles_free[j].arrive()
            if self.keep and warp == 0:
                self.values_free[c % self.values].arrive()
            if self.output and c > 0 and warp == 0:
                self.output_free[group].arrive()
        if self.output:
            last = self.chunks - 1
            yield from self.round_output(group, warp, last)
            self.output_full[group].arrive()
            if warp == 0:
                yield from self.send_output(group, last)


FLAGS = ("erase", "decay", "half", "keep", "tail")
KERNELS = [
    dict(zip(FLAGS, values, strict=True)) for values in itertools.product((False, True), repeat=5)
]


def name_of(kernel):
    return "-".join(flag for flag in FLAGS if kernel[flag]) or "none"


@pytest.mark.parametrize("kernel", KERNELS, ids=name_of)
def test_every_schedule_ends_and_reads_what_is_there(kernel):
    for seed, chunks in itertools.product(range(4), (1, 2, 3, 9)):
        Scan(seed, chunks=chunks, **kernel).run()


def test_a_second_wait_for_a_barrier_that_may_be_a_round_further_is_found():
    kernel = {"erase": False, "decay": False, "half": False, "keep": True, "tail": False}
    with pytest.raises(DeadlockError):
        for seed in range(200):
            Scan(seed, chunks=9, wait_twice=True, **kernel).run()


@pytest.mark.parametrize("decay", [False, True])
def test_buffers_given_back_before_slow_loads_are_done_are_found(decay):
    kernel = {"erase": True, "decay": decay, "half": False, "keep": False, "tail": False}
    for seed in range(6):
        Scan(seed, chunks=9, slowest_load=400, **kernel).run()
    with pytest.raises(AssertionError):
        for seed in range(50):
            Scan(seed, chunks=9, slowest_load=400, fences=False, **kernel).run()


def test_buffers_given_back_too_soon_are_found():
    class Hasty(Scan):
        def feed(self, full, free, buffers, chunk):
            index, _ = self.ring(chunk, len(buffers))
            yield None  # in the place of waiting until the buffer is free
            self.copy(full[index], index, chunk, buffers)

    kernel = {"erase": True, "decay": False, "half": False, "keep": False, "tail": False}
    with pytest.raises((AssertionError, DeadlockError)):
        for seed in range(50):
            Hasty(seed, chunks=9, **kernel).run()
