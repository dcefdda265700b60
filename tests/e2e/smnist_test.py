"""efla smnist and efla flow: a small study in full, and what is said of bad input. Makes its own
images."""

import gzip
import json
import random
import re
import unittest

from cli_support import Case, efla

SMALL = ("--width", 8, "--batch", 8, "--steps", 3, "--seeds", 2, "--learning-rates", "0.01",
         "--device", "cpu", "--threads", 1)


def idx(sizes, values):
    return (bytes([0, 0, 8, len(sizes)]) + b"".join(s.to_bytes(4, "big") for s in sizes) +
            bytes(values))


class Smnist(Case):
    def images(self, replaced=None):
        """Four IDX files of 4 x 4 pixels, some compressed."""
        folder = self.folder / "images"
        folder.mkdir(exist_ok=True)
        draw = random.Random(3)
        files = {
            "train-images-idx3-ubyte": idx([30, 4, 4], [draw.randrange(256) for _ in range(480)]),
            "train-labels-idx1-ubyte": idx([30], [draw.randrange(10) for _ in range(30)]),
            "t10k-images-idx3-ubyte": idx([9, 4, 4], [draw.randrange(256) for _ in range(144)]),
            "t10k-labels-idx1-ubyte": idx([9], [draw.randrange(10) for _ in range(9)])}
        for name, content in files.items():
            content = (replaced or {}).get(name, content)
            if name.startswith("train"):
                (folder / (name + ".gz")).write_bytes(gzip.compress(content))
            else:
                (folder / name).write_bytes(content)
        return folder

    def study(self, *arguments, out="out"):
        return ("smnist", "--data", self.folder / "images", "--out", self.folder / out, *SMALL,
                *arguments)

    def runs(self, out="out"):
        text = (self.folder / out / "runs.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def test_a_study_in_full(self):
        self.images()
        out = self.ok(*self.study("--arms", "efla,mamba2", "--parallel-runs", 2))
        self.assertEqual({(r["arm"], r["seed"]) for r in self.runs()},
                         {("efla", 42), ("efla", 43), ("mamba2", 42), ("mamba2", 43)})
        self.assertEqual(self.runs()[0]["setting"]["steps"], 3)
        self.assertRegex(out, r"\| EFLA \| [\d.]+ ± [\d.]+ \|")
        for name in ("tables.md", "corruptions.png", "rates.png"):
            self.assertGreater((self.folder / "out" / name).stat().st_size, 100)
        # A third arm joins; nothing is done twice, and the tables come again without training.
        before = (self.folder / "out" / "runs.jsonl").read_text()
        self.ok(*self.study("--arms", "efla,mamba2,rk4"))
        self.assertTrue((self.folder / "out" / "runs.jsonl").read_text().startswith(before))
        self.assertEqual(len(self.runs()), 6)
        self.assertIn("| RK-4 |", self.ok("smnist", "--report-only", "--out", self.folder / "out"))

    def test_quick_released_permuted_and_shrunk(self):
        self.images()
        self.ok(*self.study("--released", "--quick", "--permuted"))
        runs = self.runs()
        self.assertEqual([(r["arm"], r["learning_rate"], r["seed"]) for r in runs],
                         [("deltanet", 0.001, 43), ("efla", 0.003, 44)])
        setting = runs[0]["setting"]
        self.assertEqual((setting["side"], setting["permuted"], len(setting["noise"])),
                         (2, True, 6))

    def test_bad_images(self):
        for part, name, content in (
                ("truncated, it holds 3 of the 480 elements", "train-images-idx3-ubyte",
                 idx([30, 4, 4], b"abc")),
                ("8 labels do not match the 9 images", "t10k-labels-idx1-ubyte", idx([8], bytes(8))),
                ("label 2 is 11", "t10k-labels-idx1-ubyte", idx([9], [0, 1, 11] + 6 * [0])),
                ("no IDX file", "t10k-images-idx3-ubyte", b"<html>")):
            folder = self.images({name: content})
            self.fails(1, [part, folder / name], *self.study("--arms", "efla"))
        self.images()
        (self.folder / "images" / "train-labels-idx1-ubyte.gz").unlink()
        self.fails(1, ["train-labels-idx1-ubyte"], *self.study())
        self.fails(1, ["dataset-fashion-mnist"], "smnist", "--data", self.folder / "none")

    def test_bad_usage(self):
        self.images()
        self.fails(2, ["did you mean 'deltanet'"], *self.study("--arms", "deltnet"))
        self.fails(2, ["--heads 3 does not divide --width 8"], *self.study("--heads", 3))
        self.fails(2, ["cannot be shrunk 3 times"], *self.study("--shrink", 3))
        self.fails(2, ["--learning-rates"], *self.study("--learning-rates", "-1"))
        self.ok(*self.study("--arms", "efla"))
        self.fails(2, ["runs.jsonl line 1: a run of another setting (layers 1 there and 2 here)"],
                   *self.study("--arms", "efla", "--layers", 2))
        self.fails(1, ["runs.jsonl"], "smnist", "--report-only", "--out", self.folder / "none")

    def test_a_study_cut_short_says_what_is_left(self):
        self.images()
        code, _, err = efla(*self.study("--arms", "efla", "--time-limit", "1e-9"))
        self.assertEqual(code, 1)
        self.assertRegex(err, r"\nefla: error: 2 of 2 runs are left because of --time-limit; the "
                              r"same command does them\n\Z")

    def test_help_and_arms(self):
        for command in ("smnist", "flow"):
            self.assertIn(f"Example:\n  efla {command} ", self.ok(command, "--help"))
        self.assertEqual(len(self.ok("smnist", "--list-arms").splitlines()), 10)


class Flow(Case):
    def test_figures_and_picture(self):
        out = self.ok("flow", "--out", self.folder / "flow", "--dim", 4, "--tokens", 4, "--pairs", 2,
                      "--noise", 2, "--sequences", 1)
        self.assertTrue(re.search(r"^\| exact \| ", out, re.M))
        self.assertTrue((self.folder / "flow" / "flow.csv").read_text().startswith("part,method,x,"))
        self.assertGreater((self.folder / "flow" / "flow.png").stat().st_size, 100)

    def test_bad_usage(self):
        self.fails(2, ["--dim"], "flow", "--dim", 0)
        self.fails(1, ["/proc/nowhere"], "flow", "--out", "/proc/nowhere", "--sequences", 1, "--dim",
                   2, "--tokens", 2)


if __name__ == "__main__":
    unittest.main()
