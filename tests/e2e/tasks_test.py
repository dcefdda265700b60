"""End-to-end tests of `efla eval --tasks`: results that can be computed by hand, files that cannot be
used, and an evaluation that is killed and goes on."""

import gzip
import json
import math
import os
import signal
import subprocess
import time
import unittest

from cli_support import Case, PROGRAM, VOCAB, efla, english, write_model

PIQA = {"goal": "To boil an egg", "sol1": "use water", "sol2": "use sand and a shovel", "label": 0}
QUESTION = {"query": "Why", "choices": ["one", "two words"], "gold": 1}


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Tasks(Case):
    def setUp(self):
        super().setUp()
        self.data = self.folder / "tasks"
        self.data.mkdir()

    def write(self, name, content):
        path = self.data / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def run_tasks(self, model, tasks, *arguments):
        """Exit code, results by task, and stderr."""
        code, out, err = efla("eval", "--model", model, "--tasks", tasks, "--data", self.data,
                              "--json", "--device", "cpu", *arguments)
        return code, {r["task"]: r for r in map(json.loads, out.splitlines())}, err

    def test_a_uniform_model(self):
        """Each of n bytes costs log(258), so the shortest choice always wins."""
        model = write_model(self.folder / "model", uniform=True)
        self.write("piqa.jsonl", lines(PIQA, {**PIQA, "label": 1}, PIQA, PIQA))
        self.write("lambada_openai.jsonl.gz", gzip.compress(
            lines({"text": "he went home"}, {"text": "and slept well"}).encode()))
        page = " = Title = \n one @-@ two \n"
        self.write("wiki.test.raw", page)
        code, results, err = self.run_tasks(model, "piqa,lambada_openai,wikitext")
        self.assertEqual(code, 0, err)
        self.assertEqual((results["piqa"]["acc"], results["piqa"]["samples"]), (0.75, 4))
        self.assertAlmostEqual(results["piqa"]["acc_stderr"], 0.25)
        # Equal per byte, but the blank before a choice counts for the log-likelihood alone: the
        # longer choice pays less for it.
        self.assertEqual(results["piqa"]["acc_norm"], 0.25)
        self.assertAlmostEqual(results["lambada_openai"]["perplexity"], VOCAB ** 5, delta=VOCAB ** 3)
        self.assertEqual(results["lambada_openai"]["acc"], 0)
        detokenized = " = Title =\none-two\n"
        log = len(detokenized) * math.log(VOCAB)
        self.assertAlmostEqual(results["wikitext"]["bits_per_byte"] * len(page) * math.log(2), log,
                               delta=1e-3)
        self.assertAlmostEqual(math.log(results["wikitext"]["word_perplexity"]) * 8, log, delta=1e-3)

    def test_any_batch_size_and_separate_contexts(self):
        model = write_model(self.folder / "model")
        records = [{**QUESTION, "query": english(n + 1, seed=n).strip()} for n in range(12)]
        self.write("hellaswag.jsonl", lines(*records))
        reference = None
        for arguments in ([], ["--batch-tokens", "1", "--threads", "1"], ["--separate-contexts"]):
            output = self.folder / f"out{len(self.listing())}"
            code, results, err = self.run_tasks(model, "hellaswag", "--output", output, *arguments)
            self.assertEqual(code, 0, err)
            log = read_lines(output / "samples_hellaswag.jsonl")
            self.assertEqual([s["index"] for s in log], list(range(12)))
            reference = reference or log
            for ours, theirs in zip(log, reference):
                self.assertEqual((ours["acc"], ours["acc_norm"], ours["greedy"]),
                                 (theirs["acc"], theirs["acc_norm"], theirs["greedy"]))
                for a, b in zip(ours["log_likelihoods"], theirs["log_likelihoods"], strict=True):
                    self.assertAlmostEqual(a, b, delta=1e-5)
        self.assertGreater(results["hellaswag"]["tokens_requested"], 0)

    def test_shared_contexts_are_read_once(self):
        model = write_model(self.folder / "model")
        self.write("boolq.jsonl", lines({"passage": english(8).strip(), "question": "is it",
                                         "label": 1}))
        code, results, err = self.run_tasks(model, "boolq", "--window", "1000")
        self.assertEqual(code, 0, err)
        self.assertLess(results["boolq"]["tokens_read"], 0.6 * results["boolq"]["tokens_requested"])

    def test_one_bad_file_does_not_stop_the_others(self):
        model = write_model(self.folder / "model")
        self.write("piqa.jsonl", lines(PIQA, {"goal": "g", "sol1": "a", "label": 0}))
        self.write("copa.jsonl", lines(QUESTION))
        self.write("arc_easy.jsonl", lines(
            {"question": "q", "choices": {"text": ["x", "y"], "label": ["A", "B"]},
             "answerKey": "F"}))
        self.write("openbookqa.jsonl", lines({**QUESTION, "choices": ["a", ""]}))
        self.write("boolq.jsonl", lines(QUESTION) + '{"query": ')
        self.write("winogrande.jsonl", b"\xff\xfe")
        self.write("lambada_openai.jsonl.gz", b"not compressed")
        code, results, err = self.run_tasks(
            model, "piqa,copa,arc_easy,openbookqa,boolq,winogrande,lambada_openai,sciq")
        self.assertEqual(code, 1)
        self.assertEqual(results["copa"]["status"], "done")
        self.assertIn("acc", results["copa"])
        for task, part in (("piqa", 'piqa.jsonl:2: the field "sol2" is missing'),
                           ("arc_easy", 'arc_easy.jsonl:1: the answer "F" is none of the labels'),
                           ("openbookqa", "openbookqa.jsonl:1: choice 2 is empty"),
                           ("boolq", "boolq.jsonl:2 is not valid JSON"),
                           ("winogrande", "winogrande.jsonl is not valid UTF-8 at line 1"),
                           ("lambada_openai", "lambada_openai.jsonl.gz")):
            self.assertEqual(results[task]["status"], "failed")
            self.assertIn(part, results[task]["message"])
            self.assertIn(part, err)
        self.assertEqual(results["sciq"]["status"], "absent")
        last = err.splitlines()[-1]
        self.assertRegex(last, r"\Aefla: error: 7 of 8 tasks gave no result: ")
        self.assertRegex(err, r"\| sciq \| \| \| absent \|")

    def test_contexts_longer_than_the_window(self):
        model = write_model(self.folder / "model")  # reads 64 tokens
        self.write("piqa.jsonl", lines(PIQA, {**PIQA, "goal": english(3000).strip()}))
        code, results, err = self.run_tasks(model, "piqa")
        self.assertEqual(code, 0, err)
        self.assertEqual(results["piqa"]["truncated"], 1)
        self.assertRegex(err, r"warning: piqa: 1 of 2 contexts are longer than the 64 tokens .*"
                              r"piqa.jsonl:2")
        self.write("piqa.jsonl", lines({**PIQA, "sol2": "x" * 100}))
        code, results, err = self.run_tasks(model, "piqa")
        self.assertEqual(code, 1)
        self.assertIn("piqa.jsonl:1: a choice has 101 tokens but the model reads only 64",
                      results["piqa"]["message"])
        code, results, err = self.run_tasks(model, "piqa", "--window", "4096")
        self.assertEqual((code, results["piqa"]["truncated"]), (0, 0))

    def test_bad_usage(self):
        model = write_model(self.folder / "model")
        run = ["eval", "--model", model]
        self.fails(2, ["piqua", "piqa"], *run, "--tasks", "piqua", "--data", self.data)
        self.fails(2, ["--data"], *run, "--tasks", "piqa")
        self.fails(2, ["--text"], *run, "--tasks", "piqa", "--text", "x")
        self.fails(1, ["none"], *run, "--tasks", "piqa", "--data", self.folder / "none")
        self.fails(1, [self.data], *run, "--tasks", "available", "--data", self.data)
        self.fails(2, ["--data"], *run, "--data", "a", "--data", "b")
        self.fails(2, ["--limit", "--tasks"], *run, "--data", "a", "--limit", "3")
        self.fails(2, ["--max-tokens", "--tasks"], *run, "--data", self.data, "--tasks", "piqa",
                   "--max-tokens", "3")
        self.write("copa.jsonl", lines(QUESTION))
        self.fails(2, ["3 examples", "copa.jsonl"], *run, "--tasks", "copa", "--data", self.data,
                   "--shots", "3")
        self.fails(1, ["not finite"], "eval", "--model",
                   write_model(self.folder / "nan", nan=True), "--text",
                   self.path("t.txt", english(9)), "--metric", "positions", "--positions", "9")
        self.fails(2, ["no document has 70000 tokens"], *run, "--text", self.path(
            "t.txt", english(9)), "--metric", "positions", "--positions", "70000")

    def test_weights_that_are_not_finite(self):
        self.write("copa.jsonl", lines(QUESTION))
        code, results, err = self.run_tasks(write_model(self.folder / "nan", nan=True), "copa")
        self.assertEqual((code, results["copa"]["status"]), (1, "failed"))
        self.assertIn("not finite", results["copa"]["message"])

    def test_output_folder(self):
        model = write_model(self.folder / "model")
        self.write("copa.jsonl", lines(QUESTION, QUESTION))
        output = self.folder / "out"
        code, results, err = self.run_tasks(model, "copa,sciq", "--output", output)
        self.assertEqual(code, 1)
        report = json.loads((output / "results.json").read_text())
        self.assertEqual([r["status"] for r in report["results"]], ["done", "absent"])
        self.assertIn("| copa | 2 |", (output / "results.md").read_text())
        sample = read_lines(output / "samples_copa.jsonl")[0]
        self.assertEqual(sample["continuations"], ["  one", "  two words"])
        # The same evaluation goes on; another one is refused.
        code, results, err = self.run_tasks(model, "copa", "--output", output)
        self.assertEqual((code, results["copa"]["resumed"], results["copa"]["tokens_read"]),
                         (0, 2, 0))
        self.fails(2, [output, "window"], "eval", "--model", model, "--tasks", "copa", "--data",
                   self.data, "--output", output, "--window", "50")
        other = write_model(self.folder / "other", uniform=True)
        self.fails(2, [output, "model"], "eval", "--model", other, "--tasks", "copa", "--data",
                   self.data, "--output", output)

    def test_a_killed_evaluation_goes_on(self):
        model = write_model(self.folder / "model")
        records = [{**QUESTION, "query": english(60, seed=n).strip()} for n in range(150)]
        self.write("hellaswag.jsonl", lines(*records))
        arguments = ["--batch-tokens", "300", "--window", "1000"]
        code, whole, err = self.run_tasks(model, "hellaswag", *arguments)
        self.assertEqual(code, 0, err)
        output = self.folder / "out"
        log = output / "samples_hellaswag.jsonl"
        process = subprocess.Popen(
            [PROGRAM, "eval", "--model", str(model), "--tasks", "hellaswag", "--data",
             str(self.data), "--output", str(output), *arguments], stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL)
        deadline = time.time() + 60
        while time.time() < deadline and not (log.exists() and log.stat().st_size > 5000):
            time.sleep(0.002)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        code, resumed, err = self.run_tasks(model, "hellaswag", "--output", output, *arguments)
        self.assertEqual(code, 0, err)
        self.assertGreater(resumed["hellaswag"]["resumed"], 0)
        for metric in ("acc", "acc_norm", "acc_bytes"):
            self.assertEqual(resumed["hellaswag"][metric], whole["hellaswag"][metric])
        self.assertEqual(len(log.read_text().splitlines()), 150)

    def test_passkey(self):
        model = write_model(self.folder / "model")
        arguments = ["eval", "--model", model, "--tasks", "passkey", "--passkey-lengths",
                     "600,5000", "--passkey-samples", "4"]
        results = self.json(*arguments)
        self.assertEqual([r["task"] for r in results], ["passkey_600", "passkey_5000"])
        for result, length in zip(results, (600, 5000)):
            self.assertEqual((result["samples"], result["truncated"], result["exact"]), (4, 0, 0))
            self.assertGreater(result["tokens_read"], 4 * (length - 80))
        again = self.json(*arguments)
        self.assertEqual([r["acc"] for r in again], [r["acc"] for r in results])
        code, out, err = efla(*arguments[:-4], "--passkey-lengths", "20")
        self.assertEqual(code, 2)
        self.assertIn("longer than 20 tokens", err)

    def test_loss_by_position(self):
        model = write_model(self.folder / "model", uniform=True)
        text = self.path("text.txt", english(400))
        ranges = self.json("eval", "--model", model, "--text", text, "--metric", "positions",
                           "--positions", "300", "--batch-tokens", "128")
        self.assertEqual([(r["begin"], r["end"]) for r in ranges],
                         [(0, 64), (64, 128), (128, 256), (256, 300)])
        for r in ranges:
            self.assertAlmostEqual(r["loss"], math.log(VOCAB), delta=1e-4)
            self.assertEqual(r["segments"], text.stat().st_size // 300)


if __name__ == "__main__":
    unittest.main()
