#!/usr/bin/env python3
"""Compiler launcher for nvcc: ptxas_log.py COMMAND...

Runs the command and keeps what ptxas says about each kernel (-Xptxas=-v) in OBJECT.ptxas beside the object,
for kernel_report.py, instead of printing it; everything else goes through.
"""

import os
import subprocess
import sys


def is_report(line):
    return line.startswith("ptxas info") or "bytes stack frame" in line


def main():
    command = sys.argv[1:]
    run = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    lines = run.stderr.splitlines(keepends=True)
    if run.returncode != 0 or "-o" not in command:
        sys.stderr.write(run.stderr)
        return run.returncode
    target = command[command.index("-o") + 1] + ".ptxas"
    report = [line for line in lines if is_report(line)]
    if report:
        with open(target + ".new", "w") as out:
            out.writelines(report)
        os.replace(target + ".new", target)
    sys.stderr.writelines(line for line in lines if not is_report(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
