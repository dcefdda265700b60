"""The end of scripts/gpu_test.sh: failures in full, then one line of counts; exit code 1 if any.

  gpu_summary.py FOLDER DEVICE SECONDS
"""

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

LAST_LINES = 40  # of a log that holds a failure


def gtest_counts(folder):
    """(passed, failed, skipped) over the JSON reports; a program that wrote none failed."""
    counts = [0, 0, 0]
    for code in folder.glob("gtest_*.rc"):
        report = code.with_suffix(".json")
        if not report.is_file():
            counts[1] += 1
            continue
        failed = 0
        for suite in json.loads(report.read_text())["testsuites"]:
            for test in suite["testsuite"]:
                bad = "failures" in test
                failed += bad
                skipped = not bad and test.get("result") == "SKIPPED"
                counts[1 if bad else 2 if skipped else 0] += 1
        if code.read_text().strip() != "0" and not failed:
            counts[1] += 1  # it crashed after the last test
    return counts


def python_counts(folder, name):
    if not (folder / f"{name}.rc").is_file():
        return [0, 0, 0]
    try:
        suite = ET.parse(folder / f"{name}.xml").getroot()
        suite = suite.find("testsuite") if suite.tag == "testsuites" else suite
        total, bad, skipped = (
            int(suite.get("tests")),
            int(suite.get("failures")) + int(suite.get("errors")),
            int(suite.get("skipped")),
        )
    except (OSError, ET.ParseError):
        return [0, 1, 0]
    crashed = (folder / f"{name}.rc").read_text().strip() != "0" and not bad
    return [total - bad - skipped, bad + crashed, skipped]


def program_counts(folder, kind):
    codes = [path.read_text().strip() for path in folder.glob(f"{kind}_*.rc")]
    return [codes.count("0"), len(codes) - codes.count("0"), 0]


def main():
    folder, device, seconds = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    for code in sorted(folder.glob("*.rc")):
        lines = code.with_suffix(".log").read_text(errors="replace").splitlines()
        if code.read_text().strip() != "0":
            print(f"\n== {code.stem} failed; the end of its log:")
            print("\n".join(lines[-LAST_LINES:]))
        elif code.stem in ("python", "portable"):  # skips and the table of errors
            print("\n".join(lines[-30:]))
    parts = {
        "gtest": gtest_counts(folder),
        "python": python_counts(folder, "python"),
        "python on portable kernels": python_counts(folder, "portable"),
        "processes that share the device": program_counts(folder, "shared"),
        "compute-sanitizer": program_counts(folder, "sanitizer"),
    }
    failed = sum(counts[1] for counts in parts.values())
    ran = any(counts[0] for counts in parts.values())
    text = "; ".join(
        f"{name} {passed} passed, {bad} failed" + (f", {skipped} skipped" if skipped else "")
        for name, (passed, bad, skipped) in parts.items()
        if passed + bad + skipped
    )
    verdict = "PASSED" if ran and not failed else "FAILED"
    print(f"logs: {folder}", file=sys.stderr)
    print(f"\ngpu tests on {device}: {text or 'nothing ran'}; {seconds} s: {verdict}")
    return verdict != "PASSED"


if __name__ == "__main__":
    sys.exit(main())
