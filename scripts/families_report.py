"""Writes docs/families.md and docs/images/families.png from the runs of scripts/families.sh.

families_report.py FAMILY... -- [the arguments that the runs had]; nothing but the standard library
and the program gnuplot.
"""

import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
NAMES = {"efla": "EFLA", "delta_net": "DeltaNet", "gated_deltanet": "Gated DeltaNet",
         "gated_efla": "Gated EFLA", "mamba2": "Mamba-2", "transformer": "Transformer",
         "hybrid": "EFLA + sliding window"}


def read_run(family):
    folder = ROOT / "runs" / "families" / family
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["type"] == "train"]
    return {
        "name": NAMES.get(family, family),
        "family": family,
        "curve": [(line["step"], line["bits_per_byte"]) for line in lines
                  if line["type"] == "valid"],
        "steps": train[-1]["step"],
        "tokens": train[-1]["tokens"],
        "held_out": next(line["tokens"] for line in lines if line["type"] == "valid"),
        "info": json.loads((folder / "info.json").read_text()),
        "eval": json.loads((folder / "eval.json").read_text()),
        "sample": json.loads((folder / "sample.json").read_text()),
    }


def draw(runs, png):
    """Bits per byte over steps; the value before training is left out, it would flatten the rest."""
    data = "".join(f"${r['family']} << EOD\n" + "".join(f"{x} {y}\n" for x, y in r["curve"][1:])
                   + "EOD\n" for r in runs)
    plots = ", ".join(f"${r['family']} with linespoints pointtype 7 pointsize 0.6 linewidth 2 "
                      f"title '{r['name']}'" for r in runs)
    script = (f"set terminal pngcairo size 900,560\nset output '{png}'\n{data}"
              "set title 'held-out loss of every family, one recipe'\n"
              "set xlabel 'step'\nset ylabel 'bits per byte'\nset grid\n"
              f"plot {plots}\n")
    subprocess.run(["gnuplot"], input=script, text=True, check=True)


def processor():
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def one_line(text, longest=150):
    text = " ".join(text.split()).replace("|", "/")
    return text if len(text) <= longest else text[:longest].rsplit(" ", 1)[0] + " ..."


def table(runs):
    rows = ["| family | parameters | state of a sequence | held out at the start | at the end | "
            "another novel |", "|---|---|---|---|---|---|"]
    for run in runs:
        info = run["info"]
        state = f"{info['state bytes per sequence'] / 1000:,.0f} kB"
        per_token = info.get("state bytes per token", 0)
        if per_token:
            state += f" + {per_token / 1000:.1f} kB a token"
            if "softmax window" in info:
                state += f" of the last {info['softmax window']}"
        rows.append(f"| {run['name']} | {info['parameters']:,} | {state} | "
                    f"{run['curve'][0][1]:.3f} | {run['curve'][-1][1]:.4f} | "
                    f"{run['eval']['bits_per_byte']:.4f} |")
    return "\n".join(rows)


def main():
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    runs = [read_run(family) for family in sys.argv[1:split]]
    arguments = sys.argv[split + 1:]
    draw(runs, ROOT / "docs" / "images" / "families.png")
    command = " ".join(["scripts/families.sh", *arguments])
    samples = "\n".join(f"- {r['name']}: {one_line(r['sample']['prompt'] + r['sample']['text'])}"
                        for r in runs)
    (ROOT / "docs" / "families.md").write_text(f"""# Every family from one recipe

`{command}` on {datetime.date.today()}, {processor()}, {os.environ.get('OMP_NUM_THREADS', '?')} of {os.cpu_count()} cores. Each family is
`efla train configs/FAMILY.toml`: {runs[0]['steps']} steps ({runs[0]['tokens']:,} tokens) on four novels of Jane Austen; text, order, seed,
optimizer, schedule and peak learning rate are the same and tuned for none, parameters match within a few percent.

{table(runs)}

Losses in bits per byte. "held out": the first {runs[0]['held_out']:,} tokens of a fifth novel in rows of 256; "another novel": the first
{runs[0]['eval']['tokens']:,} of a sixth in windows of 256 (`efla eval --metric windows`). One seed and {runs[0]['steps']} steps show that every family trains, not which one is better.

![held-out curves](images/families.png)

After "It was a truth" (`efla generate --temperature 0.8 --top-p 0.95 --seed 7`):

{samples}
""")  # noqa: E501 - the lines of the document


if __name__ == "__main__":
    main()
