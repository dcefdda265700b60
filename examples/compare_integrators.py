#!/usr/bin/env python3
"""Euler, Runge-Kutta and the exact step on one stiff sequence: a plot of their errors.

python examples/compare_integrators.py integrators.png      (needs gnuplot; --csv writes numbers only)

Between two tokens the memory S follows dS/dt = -k k^T S + k v^T for the time beta. Its stiffness is
x = beta |k|^2. Euler's step stays finite for x < 2, RK-2's for x < 2, RK-4's for x < 2.79; here x
grows along the sequence from 0.1 to 4, so one rule after the other leaves the solution, which a fine
integration in float64 (100 substeps a token) gives without use of the closed form.
"""

import argparse
import subprocess
import sys

import efla
import torch

# %% One sequence: keys that grow, everything else of order one.
torch.manual_seed(0)
TOKENS, SIZE = 160, 16
RULES = ("euler", "rk2", "rk4", "exact")
stiffness = torch.linspace(0.1, 4.0, TOKENS, dtype=torch.float64)
beta = torch.full((1, TOKENS, 1), 0.5, dtype=torch.float64)
direction = torch.nn.functional.normalize(
    torch.randn(1, TOKENS, 1, SIZE, dtype=torch.float64), dim=-1
)
k = direction * (stiffness / 0.5).sqrt()[None, :, None, None]
q, v = (torch.randn(1, TOKENS, 1, SIZE, dtype=torch.float64) for _ in range(2))


# %% The solution of the differential equation, by many small steps of the classical RK-4 method.
def solve(substeps):
    state, outputs = torch.zeros(SIZE, SIZE, dtype=torch.float64), []
    for t in range(TOKENS):
        kt, vt, h = k[0, t, 0], v[0, t, 0], beta[0, t, 0].item() / substeps

        def slope(s, kt=kt, vt=vt):
            return torch.outer(kt, vt - kt @ s)

        for _ in range(substeps):
            a = slope(state)
            b = slope(state + h / 2 * a)
            c = slope(state + h / 2 * b)
            state = state + h / 6 * (a + 2 * b + 2 * c + slope(state + h * c))
        outputs.append(SIZE**-0.5 * q[0, t, 0] @ state)
    return torch.stack(outputs)


# %% The rules, each by the same kernel.
def errors(substeps):
    truth, found = solve(substeps), {}
    for rule in RULES:
        o, _ = efla.recurrent(q, k, v, beta, rule=rule)
        found[rule] = ((o[0, :, 0] - truth).norm(dim=-1) / truth.norm(dim=-1)).tolist()
    return found


# %% The plot.
PLOT = """
set terminal pngcairo size 900,540 font "Sans,11"
set output "{path}"
set logscale y
set format y "10^{{%T}}"
set yrange [1e-12:1e6]
set xlabel "stiffness x = {{/Symbol b}} |k|^2 (grows along the sequence)"
set ylabel "relative error of the output"
set key top left
plot for [i=2:5] $errors using 1:i with lines lw 2 title columnheader(i)
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("plot", nargs="?", help="PNG to write")
    parser.add_argument("--csv", help="table to write")
    parser.add_argument("--substeps", type=int, default=100)
    args = parser.parse_args()
    found = errors(args.substeps)
    rows = [["x", *RULES]] + [
        [f"{x:.4f}", *(f"{found[rule][t]:.6e}" for rule in RULES)]
        for t, x in enumerate(stiffness.tolist())
    ]
    if args.csv:
        with open(args.csv, "w") as file:
            file.writelines(",".join(row) + "\n" for row in rows)
    if args.plot:
        data = "\n".join(" ".join(row) for row in rows)
        script = f"$errors << EOD\n{data}\nEOD\n{PLOT.format(path=args.plot)}"
        try:
            subprocess.run(["gnuplot"], input=script, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            sys.exit(f"error: {args.plot} was not drawn: {error}; install gnuplot, or use --csv")
    for rule in RULES:
        print(f"{rule:>6}: largest relative error {max(found[rule]):.2e}")


if __name__ == "__main__":
    main()
