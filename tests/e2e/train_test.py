"""End-to-end tests of `efla train`: runs that are killed, stopped, starved of disk and misled.

Needs only Python's standard library; the program is named by EFLA_PROGRAM. Every test makes its
own data in a temporary folder.
"""

import contextlib
import json
import os
import pathlib
import random
import resource
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

PROGRAM = os.environ.get("EFLA_PROGRAM", "efla")
RECIPE = """
[model]
hidden_size = 32
num_hidden_layers = 1
num_heads = 1
intermediate_size = 48
tie_word_embeddings = true
[data]
train = "shards"
valid = "held_out"
tokenizer = "byte"
length = 32
batch = 2
[train]
out = "run"
steps = 30
eval_interval = 10
eval_tokens = 256
checkpoint_interval = 4
threads = 1
"""
TIMEOUT = 120  # seconds after which a process counts as hung


def random_text(seed, words):
    generator = random.Random(seed)
    vocabulary = ["the", "exact", "flow", "of", "a", "rule", "erases", "then", "writes", "memory"]
    return " ".join(generator.choice(vocabulary) for _ in range(words)) + "\n"


class TrainTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.data = tempfile.TemporaryDirectory(prefix="efla_e2e_data_")
        folder = pathlib.Path(cls.data.name)
        for name, seed, documents in (("shards", 1, 12), ("held_out", 2, 3)):
            inputs = []
            for i in range(documents):
                inputs.append(f"{name}{i}.txt")
                (folder / inputs[-1]).write_text(random_text(100 * seed + i, 20 + 7 * i))
            subprocess.run(
                [PROGRAM, "data", "prepare", "--input", *inputs, "--tokenizer", "byte",
                 "--output", name],
                cwd=folder, check=True, capture_output=True, timeout=TIMEOUT)
        (folder / "recipe.toml").write_text(RECIPE)
        # What every interrupted run must come to.
        cls.whole = cls.start_in(folder, "train.out=whole")
        output = cls.whole.communicate(timeout=TIMEOUT)[1]
        assert cls.whole.returncode == 0, output
        cls.expected = cls.losses_in(folder / "whole")
        assert len(cls.expected) == 30 + 4  # updates; held out at 0, 10, 20, 30

    @classmethod
    def tearDownClass(cls):
        cls.data.cleanup()

    def setUp(self):
        holder = tempfile.TemporaryDirectory(prefix="efla_e2e_")
        self.addCleanup(holder.cleanup)
        self.folder = pathlib.Path(holder.name)
        for name in ("shards", "held_out"):
            shutil.copytree(pathlib.Path(self.data.name) / name, self.folder / name)
        (self.folder / "recipe.toml").write_text(RECIPE)

    # ---- helpers ------------------------------------------------------------------------------

    @staticmethod
    def start_in(folder, *overrides, **options):
        return subprocess.Popen([PROGRAM, "train", "recipe.toml", *overrides], cwd=folder,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)

    def start(self, *overrides, **options):
        return self.start_in(self.folder, *overrides, **options)

    def train(self, *overrides, **options):
        """Runs to the end; returns (exit code, stderr)."""
        process = self.start(*overrides, **options)
        errors = process.communicate(timeout=TIMEOUT)[1]
        return process.returncode, errors

    def refused(self, code, *overrides, parts=(), **options):
        """Runs, expects `code` and one error sentence that holds all `parts`."""
        returned, errors = self.train(*overrides, **options)
        self.assertEqual(returned, code, errors)
        sentences = [line for line in errors.splitlines() if line.startswith("efla: error: ")]
        self.assertEqual(len(sentences), 1, errors)
        self.assertEqual(errors.splitlines()[-1], sentences[0])
        for part in parts:
            self.assertIn(part, sentences[0])
        return sentences[0]

    @staticmethod
    def losses_in(run):
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return [(line["type"], line["step"], float(line["loss"]).hex()) for line in lines]

    def assert_same_losses(self, run="run"):
        self.assertEqual(self.losses_in(self.folder / run), self.expected)

    def finish_and_compare(self, *overrides):
        code, errors = self.train(*overrides)
        self.assertEqual(code, 0, errors)
        self.assert_same_losses()
        for name in ("checkpoints", "."):
            leftovers = [p.name for p in (self.folder / "run" / name).iterdir() if "tmp" in p.name]
            self.assertEqual(leftovers, [])

    def checkpoints(self):
        folder = self.folder / "run" / "checkpoints"
        return sorted(p for p in folder.glob("step-*") if p.name[5:].isdigit())

    def wait_for(self, condition, process):
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            if process.poll() is not None or time.monotonic() > deadline:
                return False
        return True

    def metrics_lines(self):
        path = self.folder / "run" / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    # ---- killed and stopped ---------------------------------------------------------------------

    def test_killed_at_random_moments(self):
        seed = random.randrange(10**6)
        generator = random.Random(seed)
        with self.subTest(seed=seed):
            kills = 0
            for _ in range(6):
                process = self.start()
                lines = self.metrics_lines() + generator.randrange(1, 9)
                self.wait_for(lambda: self.metrics_lines() >= lines, process)
                time.sleep(generator.random() * 0.01)
                process.send_signal(signal.SIGKILL)
                process.communicate()
                kills += process.returncode == -signal.SIGKILL
            self.assertGreaterEqual(kills, 2)
            self.finish_and_compare()

    def test_killed_while_a_checkpoint_is_written(self):
        seed = random.randrange(10**6)
        generator = random.Random(seed)
        folder = self.folder / "run" / "checkpoints"

        def writing():
            with contextlib.suppress(FileNotFoundError):
                return any("tmp" in name for name in os.listdir(folder))
            return False

        with self.subTest(seed=seed):
            kills = 0
            for attempt in range(5):
                process = self.start("train.checkpoint_interval=1")
                # Any leftover of the last kill goes before the first new step.
                lines = self.metrics_lines()
                self.wait_for(lambda: self.metrics_lines() > lines, process)
                if not self.wait_for(writing, process):
                    break
                time.sleep(generator.random() * 0.004 * attempt)
                process.send_signal(signal.SIGKILL)
                process.communicate()
                kills += process.returncode == -signal.SIGKILL
            self.assertGreaterEqual(kills, 2)
            self.finish_and_compare("train.checkpoint_interval=1")

    def test_interrupt_and_terminate_save_and_exit(self):
        for number, name in ((signal.SIGINT, "SIGINT"), (signal.SIGTERM, "SIGTERM")):
            lines = self.metrics_lines()
            process = self.start("train.checkpoint_interval=0")
            self.assertTrue(self.wait_for(lambda: self.metrics_lines() >= lines + 3, process))
            process.send_signal(number)
            errors = process.communicate(timeout=TIMEOUT)[1]
            if process.returncode == 0:  # it was done before the signal came
                continue
            self.assertEqual(process.returncode, 1, errors)
            self.assertIn(f"stopped by {name}", errors.splitlines()[-1])
            self.assertEqual(len(self.checkpoints()) >= 1, True)
            self.assertIn(str(self.checkpoints()[-1].relative_to(self.folder)), errors)
        self.finish_and_compare("train.checkpoint_interval=0")

    def test_second_process_in_the_folder_is_refused(self):
        first = self.start("train.steps=1000000")
        self.assertTrue(self.wait_for(lambda: self.metrics_lines() >= 2, first))
        self.refused(1, "train.steps=1000000", parts=["run"])
        first.send_signal(signal.SIGINT)
        self.assertEqual(first.wait(TIMEOUT), 1)
        first.communicate()

    # ---- disks ----------------------------------------------------------------------------------

    def test_file_size_limit_while_saving(self):
        def limit():  # files of more than 40 kB cannot be written; SIGXFSZ is ignored, as in shells' children
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))

        self.refused(1, preexec_fn=limit, restore_signals=False, parts=["step-00000004"])
        self.assertEqual(self.checkpoints(), [])
        self.assertEqual(list((self.folder / "run" / "checkpoints").iterdir()), [])
        self.finish_and_compare()

    def test_full_disk(self):
        disk = self.folder / "run"
        disk.mkdir()
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2M", "tmpfs", str(disk)],
                                 capture_output=True)
        if mounted.returncode != 0:
            self.skipTest("may not mount; test_file_size_limit_while_saving is what is left")
        try:
            process = self.start()
            self.assertTrue(self.wait_for(lambda: self.metrics_lines() >= 3, process))
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=TIMEOUT)
            before = self.checkpoints()
            self.assertGreaterEqual(len(before), 1)
            filler = disk / "filler"
            with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            sentence = self.refused(1, parts=["run/"])
            self.assertIn("No space left", sentence)
            self.assertEqual(self.checkpoints(), before)
            filler.unlink()
            self.finish_and_compare()
        finally:
            subprocess.run(["umount", str(disk)], check=True)

    def test_unwritable_folder(self):
        (self.folder / "file").write_text("mine")
        self.refused(1, "train.out=file/run", parts=["file/run"])
        self.assertEqual((self.folder / "file").read_text(), "mine")
        self.refused(1, "train.out=/proc/efla_run", parts=["/proc/efla_run"])
        if os.geteuid() != 0:  # modes do not bind root
            (self.folder / "locked").mkdir(mode=0o555)
            self.refused(1, "train.out=locked/run", parts=["locked/run"])

    # ---- damaged and wrong input ----------------------------------------------------------------

    def test_damaged_checkpoint_gives_way_to_the_one_before(self):
        process = self.start()
        self.wait_for(lambda: len(self.checkpoints()) >= 2, process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        newest = self.checkpoints()[-1]
        weights = newest / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[len(content) // 2] ^= 1
        weights.write_bytes(content)
        code, errors = self.train()
        self.assertEqual(code, 0, errors)
        self.assertIn(f"efla: warning: {weights.relative_to(self.folder)}: damaged", errors)
        self.assert_same_losses()
        self.assertTrue(newest.with_name(newest.name + ".corrupt").exists())

    def test_all_checkpoints_damaged(self):
        self.train("train.steps=30", "train.keep=1")
        record = self.checkpoints()[-1] / "trainer.json"
        record.write_text(record.read_text().replace('"step": 30', '"step": 29'))
        self.refused(1, "train.keep=1", parts=["trainer.json", "--fresh"])

    def test_damaged_shards(self):
        shard = next((self.folder / "shards").glob("*.tok"))
        good = shard.read_bytes()
        flipped = bytearray(good)
        flipped[len(good) // 2] ^= 8
        for bad in (good[: len(good) // 2], good[:100], b"", bytes(flipped), bytes(300)):
            shard.write_bytes(bad)
            self.refused(1, parts=[shard.name])
            self.assertFalse((self.folder / "run").exists())
        shard.unlink()
        code, errors = self.train()
        self.assertIn(code, (1, 2), errors)
        self.assertIn("shards", errors)

    def test_tokenizer_of_other_shards(self):
        (self.folder / "text.txt").write_text(random_text(5, 4000))
        subprocess.run([PROGRAM, "tokenizer", "train", "--input", "text.txt", "--vocab-size", "300",
                        "--output", "other.model"],
                       cwd=self.folder, check=True, capture_output=True, timeout=TIMEOUT)
        code, errors = self.train("data.tokenizer=other.model")
        self.assertIn(code, (1, 2), errors)
        self.assertIn("tokenizer", errors.splitlines()[-1])
        self.assertFalse((self.folder / "run").exists())

    def test_bad_usage(self):
        self.refused(2, "train.stepps=3", parts=["train.stepps", "train.steps"])
        self.refused(2, "data.batch=-1", parts=["data.batch = -1"])
        self.refused(2, "train.steps=many", parts=["train.steps = many", "integer"])
        self.refused(2, "data.train=nowhere", parts=["nowhere"])
        (self.folder / "recipe.toml").unlink()
        self.refused(2, parts=["recipe.toml"])
        self.assertFalse((self.folder / "run").exists())

    def test_other_recipe_and_fresh(self):
        self.train()
        self.refused(2, "train.seed=7", parts=["train.seed", "--fresh"])
        self.assert_same_losses()
        code, errors = self.train("train.seed=7", "--fresh")
        self.assertEqual(code, 0, errors)
        self.assert_same_losses()
        self.assertNotEqual(self.losses_in(self.folder / "run-2"), self.expected)

    def test_fresh_run_that_stops_prints_the_command_that_goes_on(self):
        self.train("train.steps=1")
        process = self.start("--fresh", "train.steps=1000000")
        metrics = self.folder / "run-2" / "metrics.jsonl"
        self.assertTrue(self.wait_for(
            lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 3, process))
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=TIMEOUT)[1]
        self.assertEqual(process.returncode, 1, errors)
        command = shlex.split(errors.splitlines()[-1].split("`")[1])
        self.assertEqual(command[:2], ["efla", "train"])
        # As printed, but for a time limit that ends it at once.
        again = subprocess.run([PROGRAM, *command[1:], "train.time_limit=1e-9"], cwd=self.folder,
                               capture_output=True, text=True, timeout=TIMEOUT)
        self.assertEqual(again.returncode, 0, again.stderr)
        self.assertIn("resumed from run-2/checkpoints/", again.stderr)
        self.assertFalse((self.folder / "run-3").exists())

    def test_without_gnuplot(self):
        (self.folder / "empty").mkdir()
        code, errors = self.train(env={**os.environ, "PATH": str(self.folder / "empty")})
        self.assertEqual(code, 0, errors)
        warnings = [line for line in errors.splitlines() if "warning" in line]
        self.assertEqual(len(warnings), 1, errors)
        self.assertTrue(warnings[0].startswith("efla: warning: no picture at run/loss.png"), errors)
        self.assert_same_losses()

    def test_changing_the_model_leaves_the_run_whole(self):
        self.train()
        weights = self.folder / "run" / "final" / "model.safetensors"
        good = weights.read_bytes()
        with open(weights, "r+b") as file:
            file.write(bytes(len(good)))
        code, errors = self.train()
        self.assertEqual(code, 0, errors)
        self.assertNotIn("warning", errors)
        self.assertEqual(weights.read_bytes(), good)

    def test_help_and_result(self):
        text = subprocess.run([PROGRAM, "train", "--help"], capture_output=True, text=True,
                              check=True, timeout=TIMEOUT).stdout
        self.assertIn("Example:", text)
        process = self.start()
        output, errors = process.communicate(timeout=TIMEOUT)
        self.assertEqual(process.returncode, 0, errors)
        for name in ("final", "checkpoints/step-00000030", "metrics.jsonl"):
            self.assertTrue((self.folder / "run" / name).exists(), name)
            self.assertIn(f"run/{name}", output)
        self.assertIn("tokens/s", errors)
        self.assertRegex(output, r"held-out bits per byte: before \d+\.\d+, after \d+\.\d+ "
                                 r"\(the first \d+ tokens\)")
        self.assertIn("(rows-32)", errors)


if __name__ == "__main__":
    unittest.main(verbosity=2)
