#!/usr/bin/env python3
"""Errors of one chunk solved with raw keys and with normalised ones, in the roundings of the Hopper forward.

  python bench/raw_keys.py

64 tokens, K = 128, V = 64, rule exact; keys of norms log-uniform in 2^low .. 2^high, in random directions or
nearly equal, beta uniform up to a limit. L_hat is inverted with operands in half; A_hat, P_hat, the state and U
are rounded to bfloat16. Prints relative RMS errors of o and of the state behind the chunk against double
precision, means of 30 draws. Needs numpy; no GPU.
"""

import numpy as np

TOKENS, K, V, DRAWS = 64, 128, 64, 30


def bfloat16(x):
    bits = np.asarray(x, np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)


def half(x):
    return x.astype(np.float16).astype(np.float64)


def inverse(lower):
    """(I + lower)^-1: blocks of 8 exactly, then merged with operands in half."""
    result, rounded = np.zeros_like(lower), half(lower)
    for b in range(0, TOKENS, 8):
        s = slice(b, b + 8)
        result[s, s] = np.linalg.inv(np.eye(8) + lower[s, s])
    size = 8
    while size < TOKENS:
        for b in range(0, TOKENS, 2 * size):
            first, second = slice(b, b + size), slice(b + size, b + 2 * size)
            product = half(rounded[second, first] @ half(result[first, first]))
            result[second, first] = -half(result[second, second]) @ product
        size *= 2
    return result


def relative_rms(x, reference):
    return np.sqrt(((x - reference) ** 2).sum() / (reference**2).sum())


def draw(rng, low, high, near, limit):
    """Errors of o and of the state, with normalised keys and with raw ones."""
    k = rng.standard_normal((TOKENS, K))
    if near:
        k = rng.standard_normal((1, K)) + 0.1 * k
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    k = bfloat16(k * 2.0 ** rng.uniform(low, high, (TOKENS, 1)))
    norm, products = np.linalg.norm(k, axis=1), k @ k.T
    erase = -np.expm1(-rng.uniform(0, limit, TOKENS) * norm**2) / norm  # e |k|
    v, q = bfloat16(rng.standard_normal((TOKENS, V))), bfloat16(rng.standard_normal((TOKENS, K)))
    state = rng.standard_normal((K, V)) / 8

    lower = np.tril(erase[:, None] * products / norm, -1)
    u = np.linalg.solve(np.eye(TOKENS) + lower, erase[:, None] * (v - k @ state)) / norm[:, None]
    exact = q @ state + np.tril(q @ k.T) @ u, state + k.T @ u

    rounded = bfloat16(state)
    r = v - k @ rounded
    normalised = bfloat16(inverse(lower)) @ bfloat16(erase[:, None] * r) / norm[:, None]
    raw_lower = np.tril((erase / norm)[:, None] * products, -1)
    raw = bfloat16(inverse(raw_lower)) @ bfloat16((erase / norm)[:, None] * r)
    errors = []
    for u in (bfloat16(normalised), bfloat16(raw)):
        found = q @ rounded + bfloat16(np.tril(q @ k.T)) @ u, state + k.T @ u
        errors.append([relative_rms(x, y) for x, y in zip(found, exact, strict=True)])
    return errors


def main():
    rng = np.random.default_rng(0)
    print("| norms | keys | beta up to | o, normalised | o, raw | state, normalised | state, raw | ratios |")
    print("|---|---|---|---|---|---|---|---|")
    for low, high in ((0, 0), (-2, 2), (-4, 4), (-6, 6), (-6, -5), (5, 6)):
        for near in (False, True):
            for limit in (1, 0.01, 100):
                errors = [draw(rng, low, high, near, limit) for _ in range(DRAWS)]
                (o, s), (o_raw, s_raw) = np.mean(errors, axis=0)
                print(
                    f"| 2^{low} to 2^{high} | {'nearly equal' if near else 'random'} | {limit} | {o:.2e} "
                    f"| {o_raw:.2e} | {s:.2e} | {s_raw:.2e} | {o_raw / o:.2f}, {s_raw / s:.2f} |"
                )


if __name__ == "__main__":
    main()
