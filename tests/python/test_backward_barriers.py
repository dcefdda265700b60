"""The barriers of the Hopper backward's second walk (efla/kernels/cuda/sm90/backward_walk.cuh and what it
includes): see barrier_model.py."""

import itertools

import pytest
from barrier_model import DeadlockError, Model, NamedBarrier, barriers

TOKENS, SCALARS = 4, 2  # warps of the tokens' warpgroup and of the scalars


class Backward(Model):
    """Steps go from the last chunk to the first. `part`: the first step's chunk is not whole."""

    def __init__(
        self,
        seed,
        dim,
        erase,
        decay,
        part,
        long_rows,
        steps,
        write_dot_barriers=2,
        waits_for_read=True,
    ):
        super().__init__(seed)
        self.erase, self.decay, self.part, self.steps = erase, decay, part, steps
        self.waits_for_read = waits_for_read
        self.groups = dim // 64
        self.chain_warps = chain = 4 * self.groups
        self.kept = kept = 2 if dim == 64 else 1  # buffers of all but k, q and the factors
        self.long_rows = [long_rows and self.random.random() < 0.3 for _ in range(steps)]
        readers = chain if erase or decay else 0  # of U: the chain's, for B + B^T or <S, dS>
        self.tokens_full, self.tokens_free = barriers(2, 1), barriers(2, chain + TOKENS + SCALARS)
        self.grad_o_full, self.grad_o_free = barriers(kept, 1), barriers(kept, 1)
        self.grad_o_read = barriers(kept, chain)
        self.triangles_full, self.triangles_free = barriers(kept, 1), barriers(kept, chain)
        self.triangles_read, self.values_full = barriers(kept, chain), barriers(kept, 1)
        self.u_full, self.u_free = barriers(kept, 1), barriers(kept, TOKENS + readers)
        self.state_full = barriers(kept, 1)
        self.state_free = barriers(kept, TOKENS + (chain if decay else 0))
        self.grad_state_full = barriers(kept, chain)
        self.grad_state_free = barriers(kept, TOKENS + (SCALARS if kept == 2 else 0))
        self.grad_r_full = barriers(kept, chain)
        self.grad_r_free = barriers(kept, TOKENS + (chain if erase else 0))
        self.factors_full = barriers(2, SCALARS)
        self.factors_free = barriers(2, TOKENS + (chain if erase else 0))
        self.write_dot_full = barriers(write_dot_barriers, chain)
        (self.sums_full,), (self.diagonal_full,) = barriers(1, TOKENS), barriers(1, SCALARS)
        (self.lower_full,), (self.lower_free,) = barriers(1, chain), barriers(1, TOKENS)
        (self.erased_full,), (self.sums_free,) = barriers(1, TOKENS), barriers(1, SCALARS)
        (self.cleared,) = barriers(1, chain)
        self.clear_barrier, self.tokens_barrier = NamedBarrier(chain), NamedBarrier(TOKENS)
        self.chain_barriers = [NamedBarrier() for _ in range(self.groups)]
        self.scalars_barrier = NamedBarrier(SCALARS)

        # What is in the buffers; those that many warps write hold a number for each.
        def parts(count, warps):
            return [[None] * warps for _ in range(count)]

        self.k, self.q = [None] * 2, [None] * 2
        self.grad_o, self.scalars, self.state, self.u = ([None] * kept for _ in range(4))
        self.inverse, self.scores = [None] * kept, [None] * kept  # ("triangles" or "values", step)
        self.grad_state, self.grad_r = parts(kept, chain), parts(kept, chain)
        self.factors, self.write_dot, self.through = (
            parts(2, SCALARS),
            parts(2, chain),
            parts(2, chain),
        )
        self.upper, self.query_sums, self.key_sums, self.erased = parts(4, TOKENS)
        (self.lower,), (self.diagonal,) = parts(1, chain), parts(1, SCALARS)

    def run(self):
        self.start(self.feed_tokens())
        self.start(self.feed_kept())
        for warp in range(self.chain_warps):
            self.start(self.chain(warp))
        for warp in range(TOKENS):
            self.start(self.tokens(warp))
        for warp in range(SCALARS):
            self.start(self.own_scalars(warp))
        self.run_all()

    def feed_tokens(self):
        for n in range(self.steps):
            (i, parity), (j, kept_parity) = self.ring(n, 2), self.ring(n, self.kept)
            yield self.tokens_free[i].wait(parity ^ 1)
            self.copy(self.tokens_full[i], i, n, self.k, self.q)
            yield self.grad_o_free[j].wait(kept_parity ^ 1)
            self.copy(self.grad_o_full[j], j, n, self.grad_o)

    def feed_kept(self):
        for n in range(self.steps):
            j, parity = self.ring(n, self.kept)
            yield self.triangles_free[j].wait(parity ^ 1)
            self.scalars[j] = n
            self.copy(self.triangles_full[j], j, ("triangles", n), self.inverse, self.scores)
            yield self.state_free[j].wait(parity ^ 1)
            self.copy(self.state_full[j], j, n, self.state)
            yield self.u_free[j].wait(parity ^ 1)
            self.copy(self.u_full[j], j, n, self.u)
            if self.waits_for_read:
                yield self.triangles_read[j].wait(parity)
            self.copy(self.values_full[j], j, ("values", n), self.inverse, self.scores)

    def chain(self, warp):
        group, everyone = warp // 4, self.chain_warps
        for n in range(self.steps):
            (i, parity), (j, kept_parity) = self.ring(n, 2), self.ring(n, self.kept)
            yield self.tokens_full[i].wait(parity)
            if n == 0 and self.part:
                yield self.grad_o_full[0].wait(0)
                yield self.clear_barrier.sync()
                self.cleared.arrive()
            if self.long_rows[n]:
                yield self.factors_full[i].wait(parity)
            yield self.grad_state_free[j].wait(kept_parity ^ 1)
            self.grad_state[j][warp] = n
            yield None
            self.grad_state_full[j].arrive()
            yield self.chain_barriers[group].sync()
            assert self.k[i] == n
            if self.decay:
                yield self.state_full[j].wait(kept_parity)
                assert self.state[j] == n
                yield None
                assert self.state[j] == n
                self.state_free[j].arrive()
            yield self.grad_o_full[j].wait(kept_parity)
            assert self.grad_o[j] == n
            yield self.triangles_full[j].wait(kept_parity)
            if self.decay:
                yield self.u_full[j].wait(kept_parity)
                assert self.u[j] == n
                if not self.erase:
                    self.u_free[j].arrive()
                self.through[n % 2][warp] = n
            assert self.scalars[j] == n and self.scores[j] == ("triangles", n)
            yield None
            assert self.scores[j] == ("triangles", n) and self.grad_o[j] == n
            self.grad_o_read[j].arrive()
            if self.erase:
                assert self.inverse[j] == ("triangles", n)
                yield None
                assert self.inverse[j] == ("triangles", n)
            self.triangles_read[j].arrive()
            yield self.grad_r_free[j].wait(kept_parity ^ 1)
            self.grad_r[j][warp] = n
            yield None
            self.grad_r_full[j].arrive()
            yield self.chain_barriers[group].sync()
            yield self.values_full[j].wait(kept_parity)
            mine = slice(4 * group, 4 * group + 4)
            for _ in range(2):
                assert (self.scores if group else self.inverse)[j] == ("values", n)
                assert self.scalars[j] == n and self.grad_r[j][mine] == [n] * 4
                yield None
            self.write_dot[n % 2][warp] = n
            self.write_dot_full[n % len(self.write_dot_full)].arrive()
            self.triangles_free[j].arrive()
            yield None
            assert self.k[i] == self.q[i] == n
            if self.erase:
                yield self.factors_full[i].wait(parity)
                yield self.u_full[j].wait(kept_parity)
                yield self.grad_r_full[j].wait(kept_parity)
                yield self.lower_free.wait(n % 2 ^ 1)
                for _ in range(2):
                    assert self.k[i] == self.u[j] == n
                    assert self.grad_r[j] == [n] * everyone and self.factors[i] == [n] * SCALARS
                    yield None
                self.lower[warp] = n
                self.lower_full.arrive()
                self.factors_free[i].arrive()
                self.u_free[j].arrive()
                self.grad_r_free[j].arrive()
            self.tokens_free[i].arrive()

    def tokens(self, warp):
        everyone = self.chain_warps
        for n in range(self.steps):
            (i, parity), (j, kept_parity) = self.ring(n, 2), self.ring(n, self.kept)
            yield self.tokens_full[i].wait(parity)
            yield self.grad_o_full[j].wait(kept_parity)
            if n == 0 and self.part:
                yield self.cleared.wait(0)
            yield self.u_full[j].wait(kept_parity)
            assert self.u[j] == self.grad_o[j] == n
            yield self.factors_full[i].wait(parity)
            if self.decay:
                yield self.sums_free.wait(n % 2 ^ 1)
            yield self.tokens_barrier.sync()
            assert self.u[j] == self.grad_o[j] == n and self.factors[i] == [n] * SCALARS
            self.upper[warp] = n
            yield self.tokens_barrier.sync()
            yield self.state_full[j].wait(kept_parity)
            for _ in range(2):
                assert (
                    self.grad_o[j] == self.state[j] == self.k[i] == n and self.upper == [n] * TOKENS
                )
                yield None
            if self.decay:
                self.query_sums[warp] = n
            yield self.grad_o_read[j].wait(kept_parity)
            yield self.tokens_barrier.sync()
            yield self.grad_r_full[j].wait(kept_parity)
            if self.erase:
                assert self.state[j] == n and self.grad_r[j] == [n] * everyone
                yield None
                assert self.state[j] == n and self.grad_r[j] == [n] * everyone
                self.erased[warp] = n
                if self.decay:
                    self.erased_full.arrive()
            if not self.decay:
                self.sums_full.arrive()
            if warp == 0:
                yield None  # until dQ has left
                self.grad_o_free[j].arrive()
            self.grad_r_free[j].arrive()
            self.state_free[j].arrive()
            yield self.grad_state_full[j].wait(kept_parity)
            for _ in range(2):
                assert self.u[j] == n and self.grad_state[j] == [n] * everyone
                yield None
            self.u_free[j].arrive()
            self.grad_state_free[j].arrive()
            assert self.q[i] == n
            if self.decay:
                self.key_sums[warp] = n
                self.sums_full.arrive()
            if self.erase or not self.decay:
                yield self.diagonal_full.wait(n % 2)
            if self.erase:
                for _ in range(2):
                    assert (
                        self.k[i] == n
                        and self.lower == [n] * everyone
                        and self.diagonal == [n] * SCALARS
                    )
                    yield None
                self.lower_free.arrive()
            yield self.tokens_barrier.sync()
            assert self.factors[i] == [n] * SCALARS
            self.tokens_free[i].arrive()
            self.factors_free[i].arrive()

    def prepare(self, warp, n):
        i, parity = self.ring(n, 2)
        yield self.tokens_full[i].wait(parity)
        if n == 0 and self.part:
            yield self.cleared.wait(0)
        yield self.factors_free[i].wait(parity ^ 1)
        if self.decay:
            yield self.scalars_barrier.sync()
        assert self.k[i] == self.q[i] == n
        self.factors[i][warp] = n
        self.factors_full[i].arrive()
        self.tokens_free[i].arrive()

    def finish(self, warp, n):
        everyone = self.chain_warps
        i, parity = self.ring(n, len(self.write_dot_full))
        yield self.write_dot_full[i].wait(parity)
        for _ in range(2):
            assert self.write_dot[n % 2] == [n] * everyone
            assert not self.decay or self.through[n % 2] == [n] * everyone
            yield None
        if self.kept == 2:
            self.grad_state_free[n % 2].arrive()
        if self.erase:
            yield self.lower_full.wait(n % 2)
            assert self.lower == [n] * everyone
        if self.erase or not self.decay:
            yield (self.erased_full if self.decay else self.sums_full).wait(n % 2)
        assert not self.erase or self.erased == [n] * TOKENS
        if self.erase or not self.decay:
            self.diagonal[warp] = n
            self.diagonal_full.arrive()
        if self.decay:
            yield self.sums_full.wait(n % 2)
            assert self.query_sums == self.key_sums == [n] * TOKENS
            self.sums_free.arrive()
            yield self.scalars_barrier.sync()

    def own_scalars(self, warp):
        yield from self.prepare(warp, 0)
        for n in range(self.steps):
            if n + 1 < self.steps:
                yield from self.prepare(warp, n + 1)
            yield from self.finish(warp, n)


KERNELS = [
    dict(zip(("dim", "erase", "decay"), values, strict=True))
    for values in itertools.product((64, 128), (False, True), (False, True))
]


def name_of(kernel):
    return "-".join([str(kernel["dim"]), *(flag for flag in ("erase", "decay") if kernel[flag])])


@pytest.mark.parametrize("kernel", KERNELS, ids=name_of)
def test_every_schedule_ends_and_reads_what_is_there(kernel):
    for seed, steps in itertools.product(range(8), (1, 2, 3, 9)):
        Backward(seed, part=seed % 2 == 1, long_rows=seed % 4 > 1, steps=steps, **kernel).run()


@pytest.mark.parametrize("kernel", KERNELS, ids=name_of)
def test_a_barrier_that_goes_a_round_further_is_found(kernel):
    """The chain may end the next step's write_dot_full before the scalars' warps have seen this one's."""
    with pytest.raises((DeadlockError, AssertionError)):
        for seed in range(200):
            model = Backward(
                seed, part=False, long_rows=False, steps=9, write_dot_barriers=1, **kernel
            )
            model.run()


@pytest.mark.parametrize("kernel", KERNELS, ids=name_of)
def test_values_that_come_too_soon_are_found(kernel):
    with pytest.raises((DeadlockError, AssertionError)):
        for seed in range(50):
            Backward(
                seed, part=False, long_rows=False, steps=9, waits_for_read=False, **kernel
            ).run()
