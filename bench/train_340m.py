#!/usr/bin/env python3
"""A 340M DeltaNet of flash-linear-attention trained twice from one seed on the same batches: with fla's
own delta-rule kernels, and with ours under them (efla.patch_fla()). Everything else is fla's both times.

PYTHONPATH=python:WHERE_FLA_IS EFLA_LIBRARY=... python3 bench/train_340m.py --out FOLDER

Needs one GPU, fla >= 0.6 with triton, einops and transformers; no network. Text: the sources and
documents of this checkout, two bytes a token. Writes train_340m.json (losses and times of every
step), train_340m.md and, where gnuplot is, train_340m.png into FOLDER and prints the table. Two minutes on an
H200, and up to ten while fla's kernels are compiled and tuned for the first time. --report-only makes
table and picture again from the JSON.

What is compared: the first step's loss and gradients (kernel against kernel on the same weights),
the loss curves, tokens per second (median of the steps after --warmup), peak memory of the allocator.
"""

import argparse
import collections
import json
import math
import pathlib
import shutil
import subprocess
import time

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
SUFFIXES = {".md", ".py", ".cc", ".h", ".cu", ".cuh", ".sh", ".toml", ".cmake"}
VOCABULARY = 32000


def read_tokens():
    """The checkout's text as one tensor: a token is two bytes, numbered by how often they come."""
    folders = [
        ROOT / name for name in ("efla", "docs", "python", "scripts", "tests", "bench", "cmake")
    ]
    paths = sorted(p for folder in folders for p in folder.rglob("*") if p.suffix in SUFFIXES)
    text = b"\n".join(path.read_bytes() for path in paths)
    pairs = [text[i : i + 2] for i in range(0, len(text) - 1, 2)]
    ranked = [pair for pair, _ in collections.Counter(pairs).most_common(VOCABULARY - 1)]
    numbers = {pair: number + 1 for number, pair in enumerate(ranked)}
    return torch.tensor([numbers.get(pair, 0) for pair in pairs])


def commit():
    """The checkout's, whose text the batches are made of."""
    command = ["git", "-C", ROOT, "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def make_batches(args):
    tokens = read_tokens()
    generator = torch.Generator().manual_seed(args.seed)
    starts = torch.randint(len(tokens) - args.length, (args.steps, args.batch), generator=generator)
    rows = starts[..., None] + torch.arange(args.length)
    return tokens[rows].to(args.device), len(tokens)


def make_config(args):
    from fla.models import DeltaNetConfig

    size = dict(hidden_size=1024, num_hidden_layers=24, num_heads=8)  # 374 million parameters
    if args.tiny:
        size = dict(hidden_size=64, num_hidden_layers=2, num_heads=2)
    return DeltaNetConfig(
        **size,
        vocab_size=VOCABULARY,
        max_position_embeddings=args.length,
        fuse_cross_entropy=not args.tiny,
        fuse_swiglu=not args.tiny,
    )


def learning_rate(step, steps):
    """Relative: warm-up over a tenth of the steps, then a cosine down to a tenth."""
    warmup = max(steps // 10, 1)
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(steps - warmup, 1))


def gradient_error(model, expected):
    """Relative RMS of all gradients together, and the largest of a single tensor with its name."""
    difference = total = 0.0
    worst = (0.0, "")
    for name, parameter in model.named_parameters():
        reference = expected[name].to(parameter.device)
        d = (parameter.grad - reference).double().square().sum().item()
        t = reference.double().square().sum().item()
        difference, total = difference + d, total + t
        worst = max(worst, (math.sqrt(d / t) if t else 0.0, name))
    return math.sqrt(difference / total), worst


def train(config, batches, args, reference_gradients):
    """One run: a dict of losses, seconds and bytes; the first step's gradients are kept or compared."""
    from fla.models import DeltaNetForCausalLM

    on_gpu = args.device == "cuda"
    torch.manual_seed(args.seed)
    with torch.device(args.device):
        model = DeltaNetForCausalLM(config).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=on_gpu
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: learning_rate(s, len(batches))
    )
    losses, marks, result = [], [], {}
    start = time.time()
    for step, ids in enumerate(batches):
        if on_gpu:
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        with torch.autocast(args.device, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        if step == 0:
            if reference_gradients:
                result["gradient_error"], result["worst_gradient"] = gradient_error(
                    model, reference_gradients
                )
            else:
                reference_gradients.update(
                    (n, p.grad.to("cpu", copy=True)) for n, p in model.named_parameters()
                )
            result["seconds_to_first_gradient"] = time.time() - start  # compilation, tuning
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()  # the comparison has copies of its own
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    if on_gpu:
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) for a, b in zip(marks, marks[1:])]
        result["step_milliseconds"] = times
        measured = sorted(times[min(args.warmup, len(times) - 1) :])
        result["median_milliseconds"] = measured[len(measured) // 2]
        result["tokens_per_second"] = batches[0].numel() / result["median_milliseconds"] * 1000
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    result["seconds"] = time.time() - start
    result["losses"] = torch.stack(losses).float().tolist()
    result["parameters"] = sum(p.numel() for p in model.parameters())
    return result


def mean(numbers):
    return sum(numbers) / len(numbers)


def markdown(report):
    runs, args = report["runs"], report["arguments"]
    theirs, ours = (run["losses"] for run in (runs["fla"], runs["efla"]))
    steps = len(theirs)
    shown = [s for s in (1, 10, 50, 100, 150, 200) if s <= steps]

    def around(losses, step):  # the mean of the ten steps up to it; the first is alone
        return losses[0] if step == 1 else mean(losses[max(step - 10, 0) : step])

    lines = [
        f"{report['device']}; torch {report['torch']}, fla {report['fla']}, commit {report['commit']}; "
        f"{runs['fla']['parameters'] / 1e6:.0f} M parameters, {args['batch']} x {args['length']} tokens a "
        f"step, bfloat16 autocast, AdamW, seed {args['seed']}.",
        "",
        "| delta-rule kernels | tokens/s | ms per step | peak GiB | "
        + " | ".join(f"loss at {s}" for s in shown)
        + " |",
        "|---" * (4 + len(shown)) + "|",
    ]
    for name, run in runs.items():
        speed = [f"{run.get(key, math.nan):{form}}" for key, form in (
            ("tokens_per_second", ",.0f"), ("median_milliseconds", ".1f"), ("peak_gib", ".2f"))]  # fmt: skip
        cells = [f"{around(run['losses'], s):.4f}" for s in shown]
        lines.append(f"| {' | '.join([name, *speed, *cells])} |")
    worst, where = runs["efla"]["worst_gradient"]
    last = range(steps // 2, steps)
    noise = []
    if args["device"] == "cuda" and args["tiny"] == "False":
        noise = [
            "bfloat16 autocast alone moves the first gradients of a model of this size by 0.25 from float32's, "
            "whichever the kernels (bench/bf16_gradients.py, docs/performance.md)."
        ]
    lines += [
        "",
        f"First step, same weights: the losses differ by {abs(theirs[0] - ours[0]):.1e}, all gradients "
        f"together by {runs['efla']['gradient_error']:.1e} relative RMS, the worst tensor by {worst:.1e} "
        f"({where}).",
        *noise,
        f"Over the second half of the steps the losses differ by "
        f"{mean([ours[s] - theirs[s] for s in last]):+.4f} on average and by "
        f"{max(abs(ours[s] - theirs[s]) for s in last):.4f} at most.",
        f"Until the first gradient (compiling and tuning included): fla "
        f"{runs['fla']['seconds_to_first_gradient']:.0f} s, ours after it "
        f"{runs['efla']['seconds_to_first_gradient']:.0f} s.",
    ]
    return "\n".join(lines) + "\n"


PICTURE = """set terminal pngcairo noenhanced size 720,400
set output "{png}"
set xlabel "step"
set ylabel "loss, nats per token"
set grid
$losses << END
{rows}
END
plot $losses using 1:2 with lines linewidth 3 linecolor rgb "#ff9f4a" title "fla's kernels", \\
     $losses using 1:3 with lines linewidth 1 linecolor rgb "black" title "this library's (efla.patch_fla)"
"""


def draw(report, png):
    """Both loss curves; whether there was a gnuplot to draw them."""
    if not shutil.which("gnuplot"):
        return False
    losses = zip(*(report["runs"][name]["losses"] for name in ("fla", "efla")))
    rows = "\n".join(f"{step} {a} {b}" for step, (a, b) in enumerate(losses, 1))
    subprocess.run(["gnuplot"], input=PICTURE.format(png=png, rows=rows), text=True, check=True)
    return True


def rounded(value):
    """Numbers to seven digits, which is what losses in float32 and timers are good for."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def finish(report, folder):
    text = markdown(report)
    (folder / "train_340m.md").write_text(text)
    print(text)
    if not draw(report, folder / "train_340m.png"):
        print("no picture: there is no gnuplot (--report-only draws it later)")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for the two files")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warmup", type=int, default=20, help="steps that are not timed")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the program")
    parser.add_argument("--report-only", action="store_true", help="table and picture of --out")
    args = parser.parse_args()
    if args.report_only:
        return finish(json.loads((args.out / "train_340m.json").read_text()), args.out)
    args.out.mkdir(parents=True, exist_ok=True)

    import efla
    import fla

    config = make_config(args)
    batches, available = make_batches(args)
    print(f"{available:,} tokens of text; {args.steps} steps of {batches[0].numel():,}", flush=True)
    on_gpu = args.device == "cuda"
    report = {
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "torch": torch.__version__,
        "fla": fla.__version__,
        "commit": commit(),
        "arguments": {n: str(v) for n, v in vars(args).items() if n not in ("out", "report_only")},
        "runs": {},
    }
    gradients = {}
    for name in ("fla", "efla"):
        if name == "efla":
            changed = efla.patch_fla()
            assert "fla.layers.delta_net.chunk_delta_rule" in changed, changed
        run = report["runs"][name] = train(config, batches, args, gradients)
        print(f"{name}: {run['seconds']:.0f} s, loss {run['losses'][-1]:.4f}", flush=True)
        if on_gpu:
            torch.cuda.empty_cache()
        (args.out / "train_340m.json").write_text(json.dumps(rounded(report)))
    finish(report, args.out)


if __name__ == "__main__":
    main()
