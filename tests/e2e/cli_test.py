"""End-to-end tests of `efla generate`, `tokenizer`, `data` and `info`: what they print, and what
they say to bad input.
"""

import math
import os
import subprocess
import unittest

from cli_support import (Case, HIDDEN, PROGRAM, TIMEOUT, VOCAB, efla, english, model_shapes,
                         write_model)


class Usage(Case):
    def test_help_has_an_example_everywhere(self):
        for command in ([], ["train"], ["eval"], ["generate"], ["convert"], ["info"], ["tokenizer"],
                        ["data"], ["tokenizer", "train"], ["tokenizer", "encode"],
                        ["tokenizer", "decode"], ["data", "prepare"]):
            out = self.ok(*command, "--help")
            self.assertIn("Example:\n  efla " + " ".join(command), out)

    def test_version(self):
        self.assertRegex(self.ok("--version"), r"^efla \d+\.\d+\.\d+\n$")

    def test_nothing_asked(self):
        code, out, err = efla()
        self.assertEqual((code, out), (2, b""))
        self.assertIn("Usage: efla", err)

    def test_the_nearest_command_is_suggested(self):
        self.fails(2, ["'evla'", "did you mean 'eval'"], "evla")
        self.fails(2, ["'generte'", "did you mean 'generate'"], "--threads", "1", "generte", "--x")
        self.fails(2, ["'trian'", "efla tokenizer", "did you mean 'train'"], "tokenizer", "trian")

    def test_bad_options(self):
        self.fails(2, ["--nonsense", "efla info --help"], "info", "--nonsense")
        self.fails(2, ["--model", "efla eval --help"], "eval")
        self.fails(2, ["--max-tokens"], "generate", "--model", "x", "--max-tokens", "many")
        for threads in ("0", "-1", "two", "99999999999999999999"):
            self.fails(2, ["--threads"], "--threads", threads, "info")
        self.fails(2, ["subcommand"], "tokenizer")

    def test_global_options_stand_before_or_after_the_command(self):
        for arguments in (["--threads", "1", "info"], ["info", "--threads", "1"]):
            self.assertEqual(self.json(*arguments)[0]["threads"], 1)


class Tokenizer(Case):
    def train(self, vocab=400):
        text = self.path("text.txt", english(3000))
        self.ok("tokenizer", "train", "--input", text, "--vocab-size", vocab, "--output",
                self.folder / "new" / "tokenizer.model")
        return self.folder / "new" / "tokenizer.model"

    def test_text_survives_encoding_and_decoding(self):
        model = self.train()
        text = "  Spaces,\n\nnew\tlines \u2014 and \u65e5\u672c, never seen. "
        for tokenizer in (model, "byte"):
            ids = self.ok("tokenizer", "encode", "--tokenizer", tokenizer, stdin=text.encode())
            back = self.ok("tokenizer", "decode", "--tokenizer", tokenizer, stdin=ids.encode())
            self.assertEqual(back, text)
        self.assertEqual(self.ok("tokenizer", "encode", "--tokenizer", "byte", "it was"),
                         "105 116 32 119 97 115\n")
        self.assertLess(len(self.ok("tokenizer", "encode", "--tokenizer", model, "it was").split()),
                        6)

    def test_an_existing_file_is_kept(self):
        model = self.train()
        before = model.read_bytes()
        again = ["tokenizer", "train", "--input", self.folder / "text.txt", "--vocab-size", "350",
                 "--output", model]
        self.fails(2, [model, "--force"], *again)
        self.assertEqual(model.read_bytes(), before)
        self.ok(*again, "--force")
        self.assertNotEqual(model.read_bytes(), before)

    def test_bad_input(self):
        good = self.path("good.txt", english(3000))
        empty = self.path("empty.txt", "")
        broken = self.path("broken.txt", b"fine\nnot \xff fine\n")
        before = self.listing()
        def train(*inputs, output=self.folder / "t.model", vocab="400"):
            return ["tokenizer", "train", "--output", output, "--vocab-size", vocab, "--input",
                    *inputs]

        self.fails(1, [empty], *train(good, empty))
        self.fails(1, [broken, "line 2", "byte offset 9"], *train(good, broken))
        self.fails(1, [self.folder / "none.txt"], *train(self.folder / "none.txt"))
        self.fails(1, [self.folder], *train(self.folder))
        for vocab in ("-1", "0", "299", "1000000000000"):
            self.fails(2, [vocab], *train(good, vocab=vocab))
        self.fails(1, ["100000", good], *train(good, vocab="100000"))
        self.fails(2, [".model"], *train(good, output=self.folder / "t.bin"))
        self.fails(1, ["/proc/efla"], *train(good, output="/proc/efla/t.model"))
        self.fails(1, ["good.txt"], *train(good, output=good / "t.model"))
        self.fails(1, ["t.model"], *train(good), file_size_limit=1000)
        self.assertEqual(self.listing(), before)

    def test_bad_ids_and_models(self):
        decode = ["tokenizer", "decode", "--tokenizer", "byte"]
        self.fails(1, ["'x'"], *decode, "1", "x")
        self.fails(1, ["258"], *decode, "258")
        self.fails(1, ["99999999999"], *decode, "99999999999")
        self.fails(1, ["-3"], *decode, stdin=b"5 -3")
        junk = self.path("junk.model", os.urandom(5000))
        self.fails(1, [junk], "tokenizer", "encode", "--tokenizer", junk, "x")
        self.fails(1, ["none.model"], "tokenizer", "encode", "--tokenizer", "none.model", "x")
        model = self.train()
        self.fails(1, ["byte offset 1"], "tokenizer", "encode", "--tokenizer", model, stdin=b"a\xff")


class Data(Case):
    def test_the_report_counts_what_was_read(self):
        texts = [self.path("a.txt", "to be or not"), self.path("b.txt", "caf\u00e9")]
        result, = self.json("data", "prepare", "--input", *texts, "--tokenizer", "byte", "--output",
                            self.folder / "shards")
        self.assertEqual((result["documents"], result["bytes"], result["words"]), (2, 17, 5))
        self.assertEqual(result["tokens"], 17 + 4)  # BOS and EOS of each
        self.assertAlmostEqual(result["bytes_per_token"], 17 / 21)

    def test_documents_are_split_as_asked(self):
        prepare = ["data", "prepare", "--tokenizer", "byte", "--force", "--output",
                   self.folder / "shards"]
        feeds = self.path("feeds.txt", "one\n\f\ntwo\n\f\nthree\n")
        lines = self.path("lines.jsonl", '{"text": "one"}\n{"text": "two"}\n')
        for path, name, count in ((feeds, "file", 1), (feeds, "formfeed", 3), (lines, "jsonl", 2)):
            result, = self.json(*prepare, "--input", path, "--format", name)
            self.assertEqual(result["documents"], count, name)
        self.fails(2, ["paragraphs"], *prepare, "--input", feeds, "--format", "paragraphs")
        bad = self.path("bad.jsonl", '{"text": "one"}\n{"txt": 1}\n')
        self.fails(1, [f"{bad}:2"], *prepare, "--input", bad, "--format", "jsonl")

    def test_an_existing_folder_is_kept(self):
        shards = self.shards()
        before = {p.name: p.read_bytes() for p in shards.iterdir()}
        other = self.path("other.txt", "another text")
        again = ["data", "prepare", "--input", other, "--tokenizer", "byte", "--output", shards]
        self.fails(2, [shards, "--force"], *again)
        self.assertEqual({p.name: p.read_bytes() for p in shards.iterdir()}, before)
        self.path("shards/notes.txt", "mine")
        self.fails(1, [shards, "notes.txt"], *again, "--force")
        self.assertEqual(self.path("shards/notes.txt").read_text(), "mine")
        self.path("shards/notes.txt").unlink()
        self.ok(*again, "--force")
        self.assertNotEqual({p.name: p.read_bytes() for p in shards.iterdir()}, before)

    def test_bad_input_leaves_nothing(self):
        model = self.folder / "tokenizer.model"
        good = self.path("good.txt", english(3000))
        self.ok("tokenizer", "train", "--input", good, "--vocab-size", "400", "--output", model)
        empty = self.path("empty.txt", "")
        broken = self.path("broken.txt", b"a\nb\nlast \xe2\x28\xa1 line")
        before = self.listing()

        def prepare(*inputs, output=self.folder / "shards"):
            return ["data", "prepare", "--output", output, "--tokenizer", model, "--input", good,
                    *inputs]

        self.fails(1, [empty], *prepare(empty))
        self.fails(1, [broken, "line 3", "byte offset 9"], *prepare(broken))
        self.fails(1, ["none.txt"], *prepare(self.folder / "none.txt"))
        self.fails(1, ["/proc/shards"], *prepare(output="/proc/shards"))
        self.fails(1, ["good.txt"], *prepare(output=good / "shards"))
        self.fails(1, ["shards"], *prepare(), file_size_limit=1000)
        for tokens in ("0", "-5"):
            self.fails(2, ["tokens_per_shard"], *prepare(), "--tokens-per-shard", tokens)
        self.assertEqual(self.listing(), before)

    def test_one_line_of_50_megabytes(self):
        model = self.folder / "tokenizer.model"
        text = english(3000)
        self.ok("tokenizer", "train", "--input", self.path("small.txt", text), "--vocab-size",
                "400", "--output", model)
        line = text.replace("\n", " ")
        line = (line * (50_000_000 // len(line.encode()) + 1)).encode()
        path = self.path("line.txt", line)
        result, = self.json("data", "prepare", "--input", path, "--tokenizer", model, "--output",
                            self.folder / "shards")
        self.assertEqual((result["documents"], result["bytes"]), (1, len(line)))


class Generate(Case):
    def setUp(self):
        super().setUp()
        self.model = write_model(self.folder / "model")
        self.run_it = ["generate", "--model", self.model, "--ignore-eos"]

    def test_same_seed_same_text(self):
        text = self.ok(*self.run_it, "--prompt", "It was", "--max-tokens", "60", "--seed", "5")
        again = self.ok(*self.run_it, "--prompt", "It was", "--max-tokens", "60", "--seed", "5")
        other = self.ok(*self.run_it, "--prompt", "It was", "--max-tokens", "60", "--seed", "6")
        self.assertEqual(text, again)
        self.assertNotEqual(text, other)

    def test_the_prompt_comes_from_argument_file_or_stdin(self):
        prompt = self.path("prompt.txt", "It was a dark\n")
        options = ["--max-tokens", "20", "--greedy"]
        text = self.ok(*self.run_it, "--prompt", "It was a dark", *options)
        self.assertEqual(self.ok(*self.run_it, "--prompt-file", prompt, *options), text)
        self.assertEqual(self.ok(*self.run_it, *options, stdin=b"It was a dark\n"), text)
        self.assertNotEqual(self.ok(*self.run_it, "--prompt", "another", *options), text)
        self.assertEqual(self.ok(*self.run_it, "--prompt", "It was a dark", "--echo", *options),
                         "It was a dark" + text)

    def test_json_holds_tokens_and_statistics(self):
        results = self.json(*self.run_it, "--prompt", "abc", "--max-tokens", "17", "--samples", "3")
        self.assertEqual([r["sample"] for r in results], [0, 1, 2])
        for result in results:
            self.assertEqual(len(result["tokens"]), 17)
            self.assertEqual(result["prompt_tokens"], 4)
            self.assertEqual(result["stopped_by"], "max tokens")
        self.assertNotEqual(results[0]["text"], results[1]["text"])
        single, = self.json(*self.run_it, "--prompt", "abc", "--max-tokens", "17")
        self.assertEqual(single["tokens"], results[0]["tokens"])

    def test_statistics_are_on_stderr(self):
        code, out, err = efla(*self.run_it, "--prompt", "abc", "--max-tokens", "5")
        self.assertEqual(code, 0)
        self.assertRegex(err, r"^prompt 4 tokens in .* 5 tokens in .* tokens/s; stopped by max tok")

    def test_a_stop_string_ends_the_text(self):
        options = ["--prompt", "abc", "--max-tokens", "80", "--seed", "3"]
        full, = self.json(*self.run_it, *options)
        stop = full["text"][20:24]  # several bytes, hence several tokens
        cut, = self.json(*self.run_it, *options, "--stop", "never there", "--stop", stop)
        self.assertEqual(cut["text"], full["text"][:full["text"].index(stop)])
        self.assertEqual(cut["stopped_by"], "stop string")

    def test_text_is_streamed_and_is_utf8(self):
        with subprocess.Popen([PROGRAM, *map(str, self.run_it), "--prompt", "x", "--max-tokens",
                               "100000000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
            try:
                start = run.stdout.read(50)
                self.assertIsNone(run.poll())  # text is here although the end is not
            finally:
                run.kill()
        self.assertEqual(len(start), 50)
        self.ok(*self.run_it, "--prompt", "x", "--max-tokens", "300")  # decodes strictly

    def test_bad_requests(self):
        run = self.run_it
        for option, values in (("--temperature", ["-1", "nan", "inf", "hot"]),
                               ("--top-p", ["0", "-0.5", "1.5", "nan"]), ("--top-k", ["-1", "1.5"]),
                               ("--repetition-penalty", ["0", "-1", "nan"]),
                               ("--max-tokens", ["0", "-7", "1e30"]),
                               ("--samples", ["0", "-1"]), ("--seed", ["-1", "x"])):
            for value in values:
                name = option[2:]
                got, out, err = efla(*run, "--prompt", "x", option, value)
                self.assertEqual((got, out), (2, b""), (option, value, err))
                self.assertRegex(err.replace("_", "-"), rf"\Aefla: error: [^\n]*{name}[^\n]*\n\Z")
        self.fails(2, ["stop string"], *run, "--prompt", "x", "--stop", "")
        bad = self.path("bad.txt", b"\n\xc3")
        self.fails(1, [bad, "line 2", "byte offset 1"], *run, "--prompt-file", bad)
        self.fails(1, ["prompt", "byte offset 1"], *run, stdin=b"a\x80")
        self.fails(1, ["none.txt"], *run, "--prompt-file", self.folder / "none.txt")
        self.fails(1, ["empty.txt"], *run, "--prompt-file", self.path("empty.txt", ""))
        self.fails(2, ["--prompt"], *run, "--prompt", "x", "--prompt-file", bad)

    def test_output_that_cannot_be_written(self):
        with open("/dev/full", "wb") as full:
            done = subprocess.run([PROGRAM, *map(str, self.run_it), "--prompt", "x"], stdout=full,
                                  stderr=subprocess.PIPE, timeout=TIMEOUT)
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, rb"\Aefla: error: [^\n]*standard output[^\n]*\n\Z")


class Info(Case):
    def test_a_model(self):
        facts, = self.json("info", write_model(self.folder / "model", fuse_norm=True,
                                               dtype="float32", norm_first=False))
        total = sum(math.prod(shape) for shape in model_shapes().values())
        self.assertEqual(facts["parameters"], total)
        self.assertEqual(facts["parameters, embedding"], VOCAB * HIDDEN)
        self.assertEqual(facts["parameters, output head"], VOCAB * HIDDEN)
        self.assertEqual(facts["parameters, other"], total - 2 * VOCAB * HIDDEN)
        # Two heads of 16 x 16, and three convolutions of 32 channels and 4 taps, in float32.
        self.assertEqual(facts["state bytes per sequence"], 4 * (2 * 16 * 16 + 3 * 32 * 4))
        self.assertEqual(facts["ignored"], ["norm_first"])
        self.assertEqual(facts["tokenizer fingerprint"], self.json("info", "byte")[0]["fingerprint"])
        self.assertEqual((facts["family"], facts["rule"], facts["dtype"]),
                         ("efla", "exact", "float32"))

    def test_shards_and_tokenizers(self):
        shards = self.shards(text="to be\n")
        facts, = self.json("info", shards)
        self.assertEqual((facts["documents"], facts["tokens"], facts["source bytes"]), (1, 8, 6))
        byte, = self.json("info", "byte")
        self.assertEqual(byte["vocabulary"], VOCAB)
        self.assertEqual(byte["fingerprint"], facts["tokenizer"])

    def test_the_build(self):
        facts, = self.json("info")
        self.assertTrue(facts["cpu targets"])
        self.assertIn("cuda", facts)
        self.assertIn("torch", self.ok("info"))

    def test_bad_paths(self):
        self.fails(1, ["nowhere"], "info", self.folder / "nowhere")
        self.fails(2, [self.folder], "info", self.folder)
        self.fails(2, ["x.txt"], "info", self.path("x.txt", "text"))
        self.fails(1, ["x.tok"], "info", self.path("x.tok", "text"))
        long = self.folder / ("x" * 300)
        for command in (["info", long], ["eval", "--text", long], ["eval", "--data", long]):
            model = ["--model", self.folder / "model"] if command[0] == "eval" else []
            if model and not model[1].exists():
                write_model(model[1])
            self.fails(1, [long], *command, *model)


if __name__ == "__main__":
    unittest.main()
