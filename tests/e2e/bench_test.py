"""efla bench: the table, the CSV file, and what it refuses. No time is asserted."""

import csv
import os
import pathlib
import subprocess
import tempfile
import unittest

PROGRAM = os.environ["EFLA_PROGRAM"]


def efla(*arguments):
    run = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=250)
    return run.returncode, run.stdout, run.stderr


class Bench(unittest.TestCase):
    def refused(self, code, part, *arguments):
        got, out, err = efla("bench", "op", *arguments)
        self.assertEqual((got, out), (code, ""), err)
        self.assertRegex(err, r"\Aefla: error: [^\n]{10,}\n\Z")
        self.assertIn(part, err)

    def test_help_has_an_example(self):
        for command in (["bench"], ["bench", "op"]):
            code, out, _ = efla(*command, "--help")
            self.assertEqual(code, 0)
            self.assertIn("Example:\n  efla bench op", out)

    def test_rows_on_the_cpu(self):
        with tempfile.TemporaryDirectory(prefix="efla_bench_") as folder:
            path = pathlib.Path(folder) / "rows.csv"
            code, out, err = efla("bench", "op", "--device", "cpu", "--threads", 1, "--rounds", 3,
                                  "--only", "st*", "--csv", path)
            self.assertEqual(code, 0, err)
            rows = list(csv.DictReader(path.read_text().splitlines()))
        names, shapes = ["step", "step, bfloat16 state"], ["(1,1,16,128)", "(8,1,16,128)"]
        self.assertEqual(sorted((r["name"], r["shape"]) for r in rows),
                         [(name, shape) for name in names for shape in shapes])
        for row in rows:
            self.assertGreater(float(row["seconds"]), 0)
            self.assertLess(float(row["error"]), 1e-4)
        self.assertIn("threads 1", out)
        for name in names:
            self.assertEqual(out.count(f"| {name} |"), 2)

    def test_refusals(self):
        self.refused(2, "forward+backward, step", "--device", "cpu", "--only", "stroll")
        self.refused(2, "--rounds", "--device", "cpu", "--rounds", 1)
        self.refused(2, "--device", "--device", "abacus")

    def test_a_csv_file_that_cannot_be_written(self):
        code, _, err = efla("bench", "op", "--device", "cpu", "--only", "step", "--rounds", 3,
                            "--csv", "/nowhere/rows.csv")
        self.assertEqual(code, 1)
        self.assertRegex(err, r"\Aefla: error: /nowhere/rows.csv: cannot be written[^\n]*\n\Z")


if __name__ == "__main__":
    unittest.main()
