#!/usr/bin/env python3
"""The rows that gpu_peers.py wrote, as Markdown tables and as a picture. Needs no GPU.

  python bench/gpu_report.py rows.csv [more.csv ...] [--picture gpu-operator.png]

Several files (peers that were measured in different runs) give one table: a peer is compared with our time in
its own file, and ours is shown from the first. The picture needs gnuplot.
"""

import argparse
import csv
import subprocess
import sys
from pathlib import Path

PASSES = ("forward", "forward+backward")
OURS = "efla exact"
HIDDEN = {"FlashInfer split", "FlashInfer unsplit"}  # folded into FlashInfer: its fastest


def read(path):
    """{"path", "head": {name: text}, "rows": [...]} of one CSV file; its numbers as floats. Ends the
    program where the file is none that gpu_peers.py wrote."""
    head, lines = {}, []
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"gpu_report: cannot read {path}: {error}")
    for line in text.splitlines():
        if line.startswith("# "):
            name, _, value = line[2:].partition(": ")
            head[name] = value
        else:
            lines.append(line)
    rows = list(csv.DictReader(lines))
    if "copy" not in head or not rows or not {"table", "contestant", "dim"} <= set(rows[0]):
        sys.exit(f"gpu_report: {path} is no whole CSV of bench/gpu_peers.py; run that to make one")
    for row in rows:
        for name in ("ms", "fastest_ms", "error", "peak_mib", "first_s"):
            row[name] = float(row[name]) if row.get(name) else None
        for name in ("batch", "tokens", "heads", "dim"):
            row[name] = int(row[name])
    return {"path": path, "head": head, "rows": rows}


def floor_ms(row, which, bandwidth):
    """The time to move every tensor once a pass: q, k, v, o and beta; in the backward q, k, v, do, beta
    again and dq, dk, dv, dbeta."""
    size = 4 if row["dtype"] == "float32" else 2
    values = {"forward": 4, "forward+backward": 4 + 7}[which]
    scalars = {"forward": 1, "forward+backward": 3}[which]
    per_token_head = values * row["dim"] * size + scalars * 4
    tokens = row["batch"] * row["tokens"] * row["heads"]
    return tokens * per_token_head / bandwidth * 1e3


def key(row):
    return tuple(row[n] for n in ("batch", "tokens", "heads", "dim", "dtype", "layout"))


def collect(run, table):
    """{row key: {(contestant, pass): row}} in the file's order, FlashInfer's modes folded."""
    out = {}
    for row in run["rows"]:
        if row["table"] != table or row["ms"] is None:
            continue
        name = "FlashInfer" if row["contestant"] in HIDDEN else row["contestant"]
        cell = out.setdefault(key(row), {})
        old = cell.get((name, row["pass"]))
        if old is None or row["ms"] < old["ms"]:
            cell[name, row["pass"]] = row
    return out


def number(ms):
    return "" if ms is None else f"{ms:.3f}" if ms < 10 else f"{ms:.2f}"


def table_text(header, rows):
    lines = ["| " + " | ".join(map(str, header)) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, r)) + " |" for r in rows)])


def shape_text(k):
    batch, tokens, heads, _, _, layout = k
    return f"{batch} x {tokens}, {heads}" + ("" if layout == "dense" else f", {layout}")


def fastest_peer(runs, table, k, which):
    """(name, its time over ours in the same file) of the fastest peer, or None."""
    best = None
    for run in runs:
        cell = collect(run, table).get(k, {})
        ours = cell.get((OURS, which))
        for (name, found), row in cell.items():
            if found != which or name.startswith("efla") or ours is None:
                continue
            ratio = row["ms"] / ours["ms"]
            if best is None or ratio < best[1]:
                best = (name, ratio)
    return best


def operator_table(runs, table="operator"):
    cells = {}
    for run in reversed(runs):  # the first file wins
        for k, cell in collect(run, table).items():
            cells.setdefault(k, {}).update(cell)
    order = list(dict.fromkeys(k for run in runs for k in collect(run, table)))
    names = list(dict.fromkeys(n for k in order for n, _ in cells[k] if not n.startswith("efla")))
    bandwidth = float(runs[0]["head"]["copy"].split()[0])
    header = ["B x T, heads" if table == "operator" else "B x T, heads, D, dtype"]
    header += [f"{n} fwd / both" for n in names]
    header += ["EFLA fwd", "EFLA both", "floor fwd", "floor both", "faster than the fastest peer, fwd",
               "both", "error"]  # fmt: skip
    rows = []
    for k in order:
        cell = cells[k]

        def ms(name, which, cell=cell):
            row = cell.get((name, which))
            return None if row is None else row["ms"]

        line = [shape_text(k) + ("" if table == "operator" else f", {k[3]}, {k[4]}")]
        for n in names:
            both = number(ms(n, PASSES[1]))
            line.append(number(ms(n, PASSES[0])) + (f" / {both}" if both else ""))
        line += [number(ms(OURS, p)) for p in PASSES]
        any_row = next(iter(cell.values()))
        line += [number(floor_ms(any_row, p, bandwidth)) for p in PASSES]
        for p in PASSES:
            best = fastest_peer(runs, table, k, p)
            line.append("" if best is None else f"{best[1]:.2f} ({best[0]})")
        errors = [r["error"] for (n, _), r in cell.items() if n == OURS and r["error"]]
        line.append(f"{max(errors):.1e}" if errors else "")
        rows.append(line)
    return table_text(header, rows)


def variants_table(runs):
    """Our rules and layouts beside rule exact on dense rows with as many tokens."""
    run = runs[0]
    rows = []
    for table in ("operator", "variants"):
        cells = collect(run, table)
        for k, cell in cells.items():
            for p in PASSES:
                base = cell.get((OURS, p))
                for (name, found), row in cell.items():
                    if found == p and base and name.startswith("efla") and name != OURS:
                        rows.append([shape_text(k), k[3], name.removeprefix("efla "), p,
                                     number(row["ms"]), number(base["ms"]),
                                     f"{row['ms'] / base['ms']:.3f}"])  # fmt: skip
            if not k[5].startswith("packed"):
                continue
            tokens = k[0] * k[1]
            for other, dense in cells.items():
                if other[5] != "dense" or other[0] * other[1] != tokens or other[2:4] != k[2:4]:
                    continue
                for p in PASSES:
                    a, b = cell.get((OURS, p)), dense.get((OURS, p))
                    if a and b and other[0] > 8:  # the row of equal documents
                        rows.append([shape_text(k), k[3], "exact", p, number(a["ms"]),
                                     number(b["ms"]), f"{a['ms'] / b['ms']:.3f}"])  # fmt: skip
    header = ["B x T, heads", "D", "rule", "pass", "ms", "exact, dense, ms", "ratio"]
    return table_text(header, rows)


def decode_table(runs):
    cells = {}
    for run in reversed(runs):
        for k, cell in collect(run, "decode").items():
            cells.setdefault(k, {}).update({n: row for (n, _), row in cell.items()})
    order = sorted(cells)
    names = list(dict.fromkeys(n for k in order for n in cells[k]))
    rows = []
    for name in names:
        line = [name]
        for k in order:
            row = cells[k].get(name)
            if row is None:
                line.append("")
                continue
            size = 2 if name.endswith("bfloat16 state") else 4
            state = 2 * size * k[0] * k[2] * k[3] ** 2  # bytes, read and written
            line.append(f"{row['ms'] * 1e3:.2f} ({state / row['ms'] / 1e6:.0f})")
        rows.append(line)
    return table_text(["us a step (GB/s of state); batch", *(k[0] for k in order)], rows)


def other_tables(runs):
    out = []
    worst = {}
    for run in runs:
        for r in run["rows"]:
            if r["table"] == "operator" and r["error"] is not None:
                name = (r["contestant"], r["pass"])
                worst[name] = max(worst.get(name, 0), r["error"])
    if worst:
        out += ["Largest relative RMS error of the rows above against double precision:", "",
                table_text(["operator", "pass", "error"],
                           [[*name, f"{e:.1e}"] for name, e in sorted(worst.items())]), ""]  # fmt: skip
    peaks = [[r["contestant"], f"{r['peak_mib']:,.0f}", f"{r['ms']:.3f}" if r["ms"] else ""]
             for run in runs for r in run["rows"] if r["table"] == "memory"]  # fmt: skip
    if peaks:
        out += ["Peak memory of forward + backward at 4 x 8192, 32 heads, inputs included:", "",
                table_text(["operator", "MiB", "ms"], peaks), ""]  # fmt: skip
    first = [[r["pass"], f"{r['first_s']:.4f}"]
             for run in runs for r in run["rows"] if r["table"] == "first"]  # fmt: skip
    if first:
        out += ["Seconds in a fresh process (8 x 1024, 32 heads), CUDA already started:", "",
                table_text(["call", "seconds"], first), ""]  # fmt: skip
    # FlashInfer has no other cache than the process; the others' may have been filled before.
    compiled = [r for run in runs for r in run["rows"] if r["table"] == "compile"]
    shown = {r["contestant"] for r in compiled}
    for run in runs:
        for r in run["rows"]:
            if r["table"] != "operator" or r["contestant"] in shown or not r["first_s"]:
                continue
            if r["contestant"].startswith("efla") or r["contestant"] in HIDDEN:
                continue
            compiled.append(r)
            if r["pass"] == PASSES[1] or r["contestant"] == "FlashInfer":
                shown.add(r["contestant"])
    if compiled:
        rows = [[r["contestant"], f"{shape_text(key(r))}, {r['dim']}", r["pass"],
                 f"{r['first_s']:.1f}"] for r in compiled]  # fmt: skip
        out += ["The peers' first calls, compilation and tuning included:", "",
                table_text(["operator", "B x T, heads, D", "pass", "seconds"], rows), ""]  # fmt: skip
    return "\n".join(out)


def markdown(runs):
    parts = []
    for run in runs:
        head = run["head"]
        if {r["table"] for r in run["rows"]} == {"compile"}:
            continue
        parts.append(f"`{head.get('command')}`, {head.get('date')}, {head.get('device')}; "
                     f"{head.get('versions')}; device copy {head.get('copy')}.")  # fmt: skip
    present = {r["table"] for run in runs for r in run["rows"]}
    if "operator" in present:
        parts += ["Milliseconds, bfloat16, D = 128:", operator_table(runs)]
    if "heads" in present:
        parts += ["Other head sizes and float32:", operator_table(runs, "heads")]
    if present & {"variants", "operator"}:
        parts += ["What a rule, a gate or packing costs:", variants_table(runs)]
    if "decode" in present:
        parts += [decode_table(runs)]
    parts.append(other_tables(runs))
    return "\n\n".join(p for p in parts if p)


def picture(runs, path):
    """Bars of time over the memory floor, a group a row of the operator table; the floor at 1."""
    bandwidth = float(runs[0]["head"]["copy"].split()[0])
    blocks, plots = [], []
    for index, p in enumerate(PASSES):
        cells = {}
        for run in reversed(runs):
            for k, cell in collect(run, "operator").items():
                cells.setdefault(k, {}).update(
                    {n: row for (n, found), row in cell.items() if found == p}
                )
        names = [OURS, *dict.fromkeys(n for c in cells.values() for n in c if not n.startswith("efla"))]
        lines = []
        for k, cell in cells.items():
            times = [
                f"{cell[n]['ms'] / floor_ms(cell[n], p, bandwidth):.4f}" if n in cell else "NaN"
                for n in names
            ]
            lines.append(f'"{k[0]}x{k[1]}\\n{k[2]} heads" ' + " ".join(times))
        blocks.append(f"$data{index} << EOD\n" + "\n".join(lines) + "\nEOD")
        plot = ", ".join(
            f"$data{index} using {i + 2}:xtic(1) title '{n.replace(OURS, 'EFLA')}' lc rgb '{c}'"
            for i, (n, c) in enumerate(zip(names, ("#1b6ca8", "#c8c8c8", "#8f8f8f", "#d9a441")))
        )
        row = {"dtype": "bfloat16", "dim": 128, "batch": 1, "tokens": 1 << 20, "heads": 1}
        title = (f"{p.replace('+', ' + ')}, bfloat16, D = 128. Memory floor: "
                 f"{floor_ms(row, p, bandwidth):.3f} ms per 1,048,576 token-heads")  # fmt: skip
        plots.append(f"set title '{title}'\nplot {plot}, 1 with lines lc rgb '#b03030' lw 2 "
                     "title 'memory floor'")  # fmt: skip
    script = "\n".join(
        [
            "set terminal pngcairo size 1500,900 font 'sans,11'",
            f"set output '{path}'",
            "set style data histogram",
            "set style histogram clustered gap 1",
            "set style fill solid 0.9 border -1",
            "set ylabel 'time / time to move the tensors once'",
            "set yrange [0:*]",
            "set grid ytics",
            "set key outside right top",
            "set bmargin 4",
            *blocks,
            "set multiplot layout 2,1",
            *plots,
            "unset multiplot",
        ]
    )
    subprocess.run(["gnuplot"], input=script, text=True, check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csv", nargs="+")
    parser.add_argument("--picture", help="a PNG file to write")
    parser.add_argument(
        "--copy", type=float, help="bytes a second of a device copy, in place of the run's own"
    )
    arguments = parser.parse_args()
    runs = [read(path) for path in arguments.csv]
    if arguments.copy:
        runs[0]["head"]["copy"] = f"{arguments.copy:.4g} bytes/s (given)"
    print(markdown(runs))
    if arguments.picture:
        try:
            picture(runs, arguments.picture)
        except (OSError, subprocess.CalledProcessError) as error:
            sys.exit(f"gpu_report: gnuplot could not draw {arguments.picture}: {error}")


if __name__ == "__main__":
    main()
