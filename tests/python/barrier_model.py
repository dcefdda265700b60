"""Barriers of a CUDA block as coroutines under random schedules.

Warps arrive at and wait for a kernel's barriers in the kernel's order; nothing is computed: a buffer holds the
number of the chunk that is in it, and whoever reads one says which chunk it expects. What a GPU shows once in
many runs (two roles that wait for each other, a barrier a round further than its waiter knows, a buffer that is
overwritten too soon) is found here in seconds. Whoever changes a kernel's order changes its model first.
"""

import random


class DeadlockError(Exception):
    pass


class Barrier:
    """An mbarrier; a warp's 32 arrivals count as one."""

    def __init__(self, arrivals):
        self.arrivals = self.pending = arrivals
        self.phase = 0

    def arrive(self):
        assert self.pending > 0
        self.pending -= 1
        if self.pending == 0:
            self.phase, self.pending = self.phase + 1, self.arrivals

    def wait(self, parity):
        return lambda: self.phase % 2 != parity


def barriers(count, arrivals):
    return [Barrier(arrivals) for _ in range(count)]


class NamedBarrier:
    """bar.sync of so many warps, some of which may only arrive (bar.arrive)."""

    def __init__(self, warps=4):
        self.warps = warps
        self.waiting = self.generation = 0

    def arrive(self):
        self.waiting += 1
        if self.waiting == self.warps:
            self.waiting, self.generation = 0, self.generation + 1

    def sync(self):
        mine = self.generation
        self.arrive()
        return lambda: self.generation != mine


class Model:
    """One block. Coroutines yield what they wait for, or None where another warp may come in between."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.tasks = []  # [coroutine, what it waits for, how often it gets a turn]

    def start(self, coroutine):
        self.tasks.append([coroutine, None, self.random.choice((1, 1, 0.3, 0.03))])

    def run_all(self):
        while self.tasks:
            able = [t for t in self.tasks if t[1] is None or t[1]()]
            if not able:
                raise DeadlockError
            task = self.random.choices(able, [t[2] for t in able])[0]
            try:
                task[1] = next(task[0])
            except StopIteration:
                self.tasks.remove(task)

    @staticmethod
    def ring(chunk, size):
        return chunk % size, chunk // size % 2

    def copy(self, full, index, content, *buffers):
        """Starts a copy into the buffers of that index, which arrives at `full` when it is done."""
        for buffer in buffers:
            buffer[index] = "under way"

        def run():
            for _ in range(self.random.randrange(20)):
                yield None
            for buffer in buffers:
                buffer[index] = content
            full.arrive()

        self.start(run())
