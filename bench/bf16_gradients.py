#!/usr/bin/env python3
"""How far bfloat16 autocast moves the gradients of a DeltaNet and of an EFLA of 374 million parameters from
those of float32, at the first values and on one batch, and how far two sets of kernels then differ.

PYTHONPATH=python EFLA_LIBRARY=... python3 bench/bf16_gradients.py [--tiny --layers 2 --device cpu]

This is the scale for differences between kernels in bench/train_340m.py: where bfloat16 itself moves a
gradient by a quarter, two correct kernels differ by as much. The batch is that of train_340m.py's first
step. float32 and bfloat16 run here, bfloat16 with the portable kernels in a process of its own, because the
library chooses its kernels once (EFLA_CUDA_KERNELS); on a CPU both use the CPU's. Needs transformers, and
by default one large GPU. Prints a Markdown table of relative RMS differences over all
gradients together, and the median and largest of a single parameter.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
from argparse import Namespace

import torch
from train_340m import VOCABULARY, commit, make_batches

RULES = {"euler": "l2", "exact": "none"}  # rule: norm of q and k, as DeltaNet and EFLA have them


def gradients(args, ids, rule, autocast):
    """(loss, {parameter: gradient on the CPU}) of the tokens ids [B, T] at the first values of --seed."""
    from efla.models import EflaConfig, EflaForCausalLM

    size = dict(hidden_size=128, num_heads=2) if args.tiny else dict(hidden_size=1024, num_heads=8)
    config = EflaConfig(
        **size,
        num_hidden_layers=args.layers,
        vocab_size=VOCABULARY,
        rule=rule,
        qk_norm=RULES[rule],
    )
    torch.manual_seed(args.seed)
    with torch.device(args.device):
        model = EflaForCausalLM(config).train()
    with torch.autocast(args.device, torch.bfloat16, enabled=autocast):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: p.grad.cpu() for name, p in model.named_parameters()}


def portable_gradients(args, ids, rule):
    """The same under autocast in a process that keeps to the portable kernels."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "exchange.pt"
        torch.save(ids, path)
        command = [sys.executable, __file__, "--worker", str(path), rule]
        for name in ("layers", "seed", "device"):
            command += [f"--{name}", str(getattr(args, name))]
        command += ["--tiny"] if args.tiny else []
        environment = {**os.environ, "EFLA_CUDA_KERNELS": "portable"}
        subprocess.run(command, check=True, env=environment)
        return torch.load(path)


def work(args):
    """The worker: tokens are read from the file, loss and gradients are written in their place."""
    path, rule = args.worker
    torch.save(gradients(args, torch.load(path), rule, autocast=True), path)


def compare(found, expected):
    """Relative RMS difference of all gradients, the parameters' median, the largest and its name."""
    squares = total = 0.0
    single = []
    for name, reference in expected.items():
        difference = (found[name] - reference).double().square().sum().item()
        size = reference.double().square().sum().item()
        squares, total = squares + difference, total + size
        single.append(((difference / size) ** 0.5 if size else 0.0, name))
    single.sort()
    return (squares / total) ** 0.5, single[len(single) // 2][0], *single[-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="width 128 instead of 1024")
    parser.add_argument("--worker", nargs=2, metavar=("FILE", "RULE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args)
    batch = Namespace(
        steps=1, batch=args.batch, length=args.length, seed=args.seed, device=args.device
    )
    ids = make_batches(batch)[0][0]
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(
        f"{device}; torch {torch.__version__}, commit {commit()}; {args.batch} x {args.length} tokens\n"
    )
    print("| rule | gradients of | against | losses | all | median | largest | of |")
    print("|---|---|---|---|---|---|---|---|")
    for rule in RULES:
        runs = {
            "float32": gradients(args, ids, rule, autocast=False),
            "bfloat16": gradients(args, ids, rule, autocast=True),
            "bfloat16, portable kernels": portable_gradients(args, ids, rule),
        }
        names = list(runs)
        for found, expected in ((1, 0), (2, 0), (2, 1)):
            (loss, g), (loss_expected, g_expected) = runs[names[found]], runs[names[expected]]
            whole, median, largest, where = compare(g, g_expected)
            print(
                f"| {rule} | {names[found]} | {names[expected]} | {loss:.5f}, {loss_expected:.5f} | "
                f"{whole:.3f} | {median:.3f} | {largest:.3f} | {where} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
