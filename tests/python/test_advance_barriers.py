"""The barriers of Walk::kAdvance (efla/kernels/cuda/sm90/advance.cuh): see barrier_model.py."""

import itertools

import pytest
from barrier_model import DeadlockError, Model, NamedBarrier, barriers

GROUPS = 2  # warpgroups of the walk
WARPS = 4
KEYS, VALUES, TRIANGLES = 4, 3, 4  # buffers


class Advance(Model):
    """A block that walks runs of so many chunks; of some chunks (`long`) rows of k are shortened.

    Not in it: the scalars, which come with the inverse; how long reading v takes; what take_over() waits for.
    """

    def __init__(self, seed, runs, values, long, late_turns=False, early_frees=False):
        super().__init__(seed)
        self.runs, self.values, self.long = runs, values, long
        self.late_turns, self.early_frees = late_turns, early_frees
        walkers = WARPS * GROUPS
        self.keys_full, self.keys_free = barriers(KEYS, 1), barriers(KEYS, walkers)
        self.values_full, self.values_free = barriers(VALUES, 1), barriers(VALUES, walkers)
        self.ready, self.triangles_free = barriers(TRIANGLES, 1), barriers(TRIANGLES, walkers)
        self.shorten = NamedBarrier(walkers)
        self.turns = [NamedBarrier(walkers) for _ in range(GROUPS)]
        self.k, self.v, self.inverse = [None] * KEYS, [None] * VALUES, [None] * TRIANGLES
        self.updates = []  # groups in the order of their updates

    def run(self):
        self.start(self.feed(self.keys_full, self.keys_free, self.k))
        self.start(self.feed(self.ready, self.triangles_free, self.inverse))
        if self.values:
            self.start(self.feed(self.values_full, self.values_free, self.v))
        for group, warp in itertools.product(range(GROUPS), range(WARPS)):
            self.start(self.walk(group, warp))
        self.run_all()
        return self.updates

    def feed(self, full, free, buffers):
        for c in range(sum(self.runs)):
            index, parity = self.ring(c, len(buffers))
            yield free[index].wait(parity ^ 1)
            self.copy(full[index], index, c, buffers)

    def await_chunk(self, c):
        for full, size in ((self.ready, TRIANGLES), (self.keys_full, KEYS)):
            index, parity = self.ring(c, size)
            yield full[index].wait(parity)

    def free_chunk(self, c):
        self.keys_free[c % KEYS].arrive()
        self.triangles_free[c % TRIANGLES].arrive()
        if self.values:
            self.values_free[c % VALUES].arrive()

    def walk(self, group, warp):
        begin = 0
        for count in self.runs:
            end = begin + count
            if group == 1:
                self.turns[0].arrive()
            yield from self.await_chunk(begin)
            for c in range(begin, end):
                if c in self.long:
                    yield self.shorten.sync()
                assert self.k[c % KEYS] == c
                yield None  # S^T K^T
                if self.late_turns and c > begin:
                    self.turns[1 - group].arrive()
                if c > begin and not self.early_frees:
                    self.free_chunk(c - 1)
                if self.values:
                    index, parity = self.ring(c, VALUES)
                    yield self.values_full[index].wait(parity)
                    assert self.v[index] == c
                assert self.inverse[c % TRIANGLES] == c
                yield self.turns[group].sync()
                self.updates += [group] if warp == 0 else []
                if self.early_frees:
                    self.free_chunk(c)
                if c + 1 < end:
                    yield from self.await_chunk(c + 1)
                yield None  # the update ends
                assert self.k[c % KEYS] == c and self.inverse[c % TRIANGLES] == c
                if not self.late_turns and not (group == 1 and c + 1 == end):
                    self.turns[1 - group].arrive()
            if self.late_turns and group == 0:
                self.turns[1].arrive()
            if not self.early_frees:
                self.free_chunk(end - 1)
            begin = end


RUNS = ([1], [2], [9], [1, 1, 1], [3, 5, 1], [8, 1, 4])


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("long", [(), (0,), (3, 4), range(20)], ids=["none", "first", "some", "all"])
def test_every_schedule_ends_and_the_warpgroups_take_turns(values, long):
    for seed, runs in itertools.product(range(6), RUNS):
        assert Advance(seed, runs, values, long).run() == [0, 1] * sum(runs)


def test_a_turn_passed_behind_the_next_product_is_found_where_both_shorten_rows():
    for seed in range(20):
        Advance(seed, [9], True, (), late_turns=True).run()
    with pytest.raises(DeadlockError):
        Advance(0, [9], True, (3,), late_turns=True).run()


def test_buffers_given_back_too_soon_are_found():
    with pytest.raises((AssertionError, DeadlockError)):
        for seed in range(200):
            Advance(seed, [9], True, (), early_frees=True).run()
