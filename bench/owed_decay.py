#!/usr/bin/env python3
"""Errors of the Hopper forward with decay, whose state is stored without the decay that it owes.

  python bench/owed_decay.py [--most 64] [--least -24] [--late]

One head, 13 chunks of 64 tokens, K = 32, V = 16: the formulas of make_scalars() in
efla/kernels/cuda/sm90/chunk_scalars.cuh and of the walk behind it, in float32 with operands rounded to bfloat16
(the inverse is exact before that), beside the recurrence in double precision, for three rules, kinds of gates
and of key norms; some betas are subnormal. Prints relative RMS errors of o and of the final state, and how many
chunks were wide. --most and --least are the powers of two between which a decay is owed; --late pays only below
1, not when another chunk like this one would not fit. Needs numpy; no GPU.
"""

import argparse

import numpy as np
from raw_keys import bfloat16, relative_rms

CHUNK, TOKENS, K, V = 64, 785, 32, 16
LEAST_FACTOR = 2.0**-40
SCALE = np.float32(1 / np.sqrt(K))


def single(x):
    return np.asarray(x, np.float32)


def rounded(x):
    return single(bfloat16(x))


def flushed(x):
    """As float, what is not a normal number as zero."""
    return single(np.where(np.abs(x) < 2.0**-126, 0, x))


def log_gate(rule, log_decay):
    return np.expm1(log_decay) if rule == "exact" else log_decay


def coefficients(rule, beta, square, log_decay):
    """(e, w) times |k|^2, where that is not zero."""
    if rule == "euler":
        return beta * square, beta * square
    rate = square * np.exp(log_decay) if rule == "exact" else square
    eta = beta * rate - log_gate(rule, log_decay)
    share = np.divide(beta, eta, out=np.zeros_like(eta), where=eta > 0)
    return -np.expm1(-beta * rate), np.where(eta > 0, -np.expm1(-eta) * share, beta) * square


def recurrence(rule, q, k, v, beta, log_decay, state):
    out = []
    for t in range(len(q)):
        square = k[t] @ k[t]
        erase, write = (x / square for x in coefficients(rule, beta[t], square, log_decay[t]))
        state = np.exp(log_gate(rule, log_decay[t])) * state
        state = state + np.outer(k[t], write * v[t] - erase * (k[t] @ state))
        out.append(SCALE * (q[t] @ state))
    return np.array(out), state


def next_owed(chunk_gate, most):
    power = np.clip(256 / max(chunk_gate, 1e-300), 2.0**32, 2.0**most)
    return 2.0 ** np.floor(np.log2(power))


def forward(rule, q, k, v, beta, log_decay, state, args):
    """(o, final state, wide chunks)."""
    state, owed, out, wide_chunks = single(state), 1.0, [], 0
    q, k, v, beta, log_decay = (single(x) for x in (q, k, v, beta, log_decay))
    for begin in range(0, len(q), CHUNK):
        t = slice(begin, begin + CHUNK)
        products = k[t] @ k[t].T
        square = np.diag(products)
        root = 1 / np.sqrt(square)
        erased, written = (single(x) * root for x in coefficients(rule, beta[t], square, log_decay[t]))
        total = np.cumsum(log_gate(rule, log_decay[t]).astype(np.float64))
        before, behind = flushed(np.exp(total)), flushed(np.exp(total[-1] - total))
        decay = single(np.tril(np.exp(np.minimum(total[:, None] - total, 0))))
        chunk_gate = float(before[-1])
        gate = owed * chunk_gate
        before = single(owed * before)
        mild = (square >= 2.0**-12) & (square <= 2.0**12) & (np.abs(erased) <= 2 * root)
        mild &= np.abs(written) <= 2.0**16 * np.abs(erased)
        wide = not (mild.all() and 2.0**args.least <= gate <= 2.0**args.most)
        wide_chunks += wide
        again = args.late or gate * chunk_gate >= 2.0**args.least
        last = begin + CHUNK >= len(q)
        owed, pay = gate, 1.0
        if wide or last or not (1 <= gate <= 2.0**48 and again):
            owed = 1.0 if last else next_owed(chunk_gate, args.most)
            pay = (1.0 if wide else gate) / owed
        lower = erased[:, None] * products * (decay * root if wide else root[:, None])
        inverse = rounded(np.tril(np.linalg.inv(np.eye(len(root)) + np.tril(lower, -1))))
        scores = np.tril(q[t] @ k[t].T)
        if wide:
            erase = single(erased * before)
            erase = np.where((written != 0) & (np.abs(erase) < LEAST_FACTOR * root), LEAST_FACTOR * root, erase)
            divisor = erase
            before, behind = np.maximum(before, LEAST_FACTOR), np.maximum(behind, LEAST_FACTOR)
            scores = scores * decay / (before[:, None] * behind)
            key_out, kept = root * behind, gate
        else:
            erase, divisor, key_out, kept = erased * root, single(erased * before), np.ones_like(root), 1.0
        write = np.divide(written, divisor, out=np.zeros_like(written), where=divisor != 0)
        r = erase[:, None] * (write[:, None] * v[t] - k[t] @ rounded(state))
        u = rounded((inverse @ rounded(r)) * key_out[:, None])
        out.append(rounded((SCALE * before)[:, None] * (q[t] @ rounded(state) + rounded(scores) @ u)))
        state = single(single(single(kept) * state + k[t].T @ u) * single(pay))
    return np.concatenate(out), state, wide_chunks


GATES = {
    "uniform to 0.1": lambda rng: -0.1 * rng.random(TOKENS),
    "uniform to 1": lambda rng: -rng.random(TOKENS),
    "steady 0.9": lambda rng: -0.9 - 0.02 * rng.random(TOKENS),
    "log sigmoid": lambda rng: -np.log1p(np.exp(-rng.standard_normal(TOKENS))),
    "uniform to 6": lambda rng: -6 * rng.random(TOKENS),
    "by chunks": lambda rng: np.repeat(rng.choice([-0.01, -0.3, -1.2], TOKENS // CHUNK + 1), CHUNK)[:TOKENS],
    "resets": lambda rng: np.where(np.arange(TOKENS) % 100 == 37, -1000.0, -0.05),
}


def draw(rng, rule, gates, spread, tiny):
    k = rng.standard_normal((TOKENS, K))
    k *= np.exp(rng.uniform(-spread, spread, (TOKENS, 1))) / np.linalg.norm(k, axis=1, keepdims=True)
    q, v = (rng.standard_normal((TOKENS, size)) for size in (K, V))
    k, q, v = bfloat16(k), bfloat16(q), bfloat16(v)
    beta = rng.random(TOKENS)
    if rule == "euler":  # stable steps
        beta = np.minimum(beta, 1.9 / (k**2).sum(1))
    if tiny:
        beta[::3] = 3.8e-44
    exact = [single(x).astype(np.float64) for x in (beta, GATES[gates](rng), rng.standard_normal((K, V)))]
    return rule, q, k, v, *exact


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=64)
    parser.add_argument("--least", type=int, default=-24)
    parser.add_argument("--late", action="store_true")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    print("| rule | gates | norms | betas | o | state | wide chunks of 13 |\n|---|---|---|---|---|---|---|")
    for rule in ("exact", "exact_log", "euler"):
        for gates in GATES:
            for spread, tiny in ((0, False), (0, True), (1, False), (4.2, False)):
                case = draw(rng, rule, gates, spread, tiny)
                o, state = recurrence(*case)
                with np.errstate(all="ignore"):
                    found_o, found_state, wide = forward(*case, args)
                print(
                    f"| {rule} | {gates} | e^±{spread} | {'some 4e-44' if tiny else 'to 1'} "
                    f"| {relative_rms(found_o, o):.1e} | {relative_rms(found_state, state):.1e} | {wide} |"
                )


if __name__ == "__main__":
    main()
