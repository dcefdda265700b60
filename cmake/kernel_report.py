#!/usr/bin/env python3
"""Registers, stack, spills and static shared memory of every CUDA kernel in one table.

  kernel_report.py --exceptions FILE --output FILE OBJECT...

Reads OBJECT.ptxas, which ptxas_log.py wrote when the object was compiled. A kernel that spills registers
fails the build, unless the file of exceptions allows it: lines of a regular expression that the whole kernel
name must match, the most bytes of spill loads, and a reason, with " | " between them.
"""

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Kernel:
    name: str = ""
    arch: str = ""
    registers: int = 0
    stack: int = 0
    stores: int = 0  # bytes spilled
    loads: int = 0
    shared: int = 0


def parse(text):
    """The kernels of one object, by mangled name."""
    kernels, current = [], None
    for line in text.splitlines():
        if found := re.search(r"Compiling entry function '([^']+)' for '([^']+)'", line):
            current = Kernel(*found.groups())
            kernels.append(current)
        elif "Function properties for" in line and current is not None:
            if line.split()[-1].strip("'") != current.name:
                current = None  # a device function that was not inlined
        elif current is None:
            continue
        elif found := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            current.stack, current.stores, current.loads = map(int, found.groups())
        elif found := re.search(r"Used (\d+) registers", line):
            current.registers = int(found[1])
            shared = re.search(r"(\d+) bytes smem", line)
            current.shared = int(shared[1]) if shared else 0
            current = None
    return kernels


def demangle(kernels):
    """Readable names: template arguments kept, parameters and our own namespaces left out."""
    try:
        names = subprocess.run(
            ["c++filt"], input="\n".join(k.name for k in kernels), capture_output=True, text=True,
            check=True,
        ).stdout.splitlines()  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return
    for kernel, name in zip(kernels, names):
        name = re.sub(r"^void ", "", name)
        name = name.replace("(anonymous namespace)::", "").replace("efla::cuda::", "")
        depth = 0  # the parameter list begins at the first ( outside < >
        for i, c in enumerate(name):
            depth += (c == "<") - (c == ">")
            if c == "(" and depth == 0:
                name = name[:i]
                break
        name = re.sub(r"\((?:unsigned )?(?:int|bool|long)\)", "", name)
        kernel.name = re.sub(r"\(\w+::\w+\)", "", name)


def read_exceptions(path):
    """[pattern, bytes, reason, used]"""
    out = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        fields = [field.strip() for field in line.split(" | ")]
        if len(fields) != 3 or not fields[1].isdigit() or not fields[2]:
            sys.exit(f"{path}:{number}: must hold 'pattern | bytes | reason'")
        out.append([re.compile(fields[0]), int(fields[1]), fields[2], False])
    return out


def allowed(kernel, exceptions):
    for entry in exceptions:
        if entry[0].fullmatch(kernel.name) and kernel.loads <= entry[1]:
            entry[3] = True
            return True
    return False


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--exceptions", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("objects", nargs="+")
    arguments = parser.parse_args()
    kernels = {}
    for name in arguments.objects:
        log = Path(name + ".ptxas")
        if not log.is_file():
            # Objects of C++ files have none, and neither do .cu files without a kernel.
            continue
        for kernel in parse(log.read_text()):
            kernels[kernel.name, kernel.arch] = kernel
    if not kernels:
        sys.exit("kernel_report: no object has a .ptxas file beside it: compile the CUDA part again")
    kernels = list(kernels.values())
    demangle(kernels)
    kernels.sort(key=lambda k: (k.name, k.arch))
    exceptions = read_exceptions(arguments.exceptions)

    width = max(len(k.name) for k in kernels)
    lines = [f"{'kernel':{width}}  {'arch':7} regs  stack  spill st/ld  static smem"]
    bad = []
    for k in kernels:
        mark = ""
        if k.stores or k.loads:
            ok = allowed(k, exceptions)
            mark = "  allowed" if ok else "  SPILLS"
            if not ok:
                bad.append(k)
        lines.append(f"{k.name:{width}}  {k.arch:7} {k.registers:4}  {k.stack:5}  "
                     f"{k.stores:5}/{k.loads:<5}  {k.shared:11}{mark}")  # fmt: skip
    for pattern, _, _, used in exceptions:
        if not used:
            lines.append(f"no kernel needs the exception '{pattern.pattern}' any more")
    lines.append(f"{len(kernels)} kernels, {len(bad)} with spills that are not allowed")
    text = "\n".join(lines)
    print(text)
    if bad:
        sys.exit(f"kernel_report: {', '.join(k.name for k in bad)} spill registers; make them smaller, or "
                 f"add an exception with its reason to {arguments.exceptions}")  # fmt: skip
    Path(arguments.output).write_text(text + "\n")


if __name__ == "__main__":
    main()
