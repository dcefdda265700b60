"""End-to-end tests of `efla eval`, `generate`, `tokenizer`, `data` and `info`: what they print, and
what they say to bad input.

Needs only Python's standard library; the program is named by EFLA_PROGRAM. Every test makes its
own data in a temporary folder.
"""

import json
import math
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import tempfile
import unittest
import zlib

PROGRAM = os.environ.get("EFLA_PROGRAM", "efla")
TIMEOUT = 120  # seconds after which a process counts as hung
VOCAB = 258  # of the byte tokenizer
HIDDEN = 32
INNER = 48


def efla(*arguments, stdin=b"", cwd=None, file_size_limit=None):
    """Runs the program; returns (exit code, stdout, stderr) with the streams as bytes and text."""

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writes fail with EFBIG instead
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size_limit, file_size_limit))

    done = subprocess.run(
        [PROGRAM, *map(str, arguments)], input=stdin, cwd=cwd, capture_output=True,
        timeout=TIMEOUT, preexec_fn=limit if file_size_limit else None)
    return done.returncode, done.stdout, done.stderr.decode()


def english(words, seed=1):
    generator = random.Random(seed)
    vocabulary = ("the exact flow of a rule erases then writes memory while it was dark and "
                  "stormy caf\u00e9 \u201cna\u00efve\u201d 1813").split()
    return " ".join(generator.choice(vocabulary) for _ in range(words)) + "\n"


def model_shapes(vocab=VOCAB):
    shapes = {"model.embeddings.weight": (vocab, HIDDEN), "model.norm.weight": (HIDDEN,),
              "lm_head.weight": (vocab, HIDDEN)}
    layer = "model.layers.0."
    for name in ("q", "k", "v"):
        shapes[f"{layer}attn.{name}_proj.weight"] = (HIDDEN, HIDDEN)
        shapes[f"{layer}attn.{name}_conv1d.weight"] = (HIDDEN, 1, 4)
    shapes |= {
        f"{layer}attn.b_proj.weight": (2, HIDDEN),
        f"{layer}attn.o_norm.weight": (HIDDEN // 2,),
        f"{layer}attn.o_proj.weight": (HIDDEN, HIDDEN),
        f"{layer}attn_norm.weight": (HIDDEN,),
        f"{layer}mlp_norm.weight": (HIDDEN,),
        f"{layer}mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{layer}mlp.up_proj.weight": (INNER, HIDDEN),
        f"{layer}mlp.down_proj.weight": (HIDDEN, INNER)}
    return shapes


def fingerprint(text):
    """64-bit FNV-1a in hex: what config.json says of the tokenizer."""
    value = 0xcbf29ce484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001b3 % 2**64
    return f"{value:016x}"


def write_model(folder, uniform=False, nan=False, vocab=VOCAB, **config):
    """A model folder with random weights, written here from the format's description."""
    folder.mkdir(parents=True)
    generator = random.Random(7)
    header, payload, offset = {}, [], 0
    for name, shape in model_shapes(vocab).items():
        count = math.prod(shape)
        if "norm" in name:
            values = [1.0] * count
        elif uniform and name == "lm_head.weight":
            values = [0.0] * count
        else:
            values = [generator.gauss(0, 0.2) for _ in range(count)]
        if nan and name == "model.norm.weight":
            values[3] = math.nan
        payload.append(struct.pack(f"<{count}f", *values))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + 4 * count]}
        offset += 4 * count
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    (folder / "model.safetensors").write_bytes(
        struct.pack("<Q", len(head)) + head + b"".join(payload))
    (folder / "config.json").write_text(json.dumps({
        "model_type": "efla", "rule": "exact", "beta_activation": "sigmoid", "qk_norm": "none",
        "vocab_size": vocab, "hidden_size": HIDDEN, "num_hidden_layers": 1, "num_heads": 2,
        "intermediate_size": INNER, "max_position_embeddings": 64, "bos_token_id": 256,
        "eos_token_id": 257, "tokenizer_fingerprint": fingerprint("byte tokenizer, version 1"),
        **config}))
    return folder


def write_checkpoint(folder):
    """The model as a checkpoint: with a file that only training reads, and all files recorded."""
    write_model(folder)
    (folder / "optimizer.safetensors").write_bytes(b"moments")
    files = {p.name: {"bytes": p.stat().st_size, "crc32": zlib.crc32(p.read_bytes())}
             for p in folder.iterdir()}
    (folder / "trainer.json").write_text(json.dumps({"version": 1, "files": files}))
    return folder


class Case(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory(prefix="efla_cli_")
        self.addCleanup(holder.cleanup)
        self.folder = pathlib.Path(holder.name)

    def path(self, name, content=None):
        path = self.folder / name
        if isinstance(content, str):
            content = content.encode()
        if content is not None:
            path.write_bytes(content)
        return path

    def ok(self, *arguments, **options):
        code, out, err = efla(*arguments, **options)
        self.assertEqual(code, 0, err)
        return out.decode()

    def json(self, *arguments, **options):
        return [json.loads(line) for line in self.ok(*arguments, "--json", **options).splitlines()]

    def fails(self, code, parts, *arguments, **options):
        """The exit code, nothing on stdout, and one sentence on stderr (after the progress until
        then, if any) that holds all `parts`."""
        got, out, err = efla(*arguments, **options)
        self.assertEqual(got, code, err)
        err = re.sub(r"\A(tokenizing|stateful|windows-\d+) \d+/\d+ .*\n", "", err)
        self.assertEqual(out, b"")
        self.assertRegex(err, r"\Aefla: error: [^\n]{10,2000}\n\Z")
        for part in parts:
            self.assertIn(str(part), err)

    def listing(self):
        return sorted(str(p.relative_to(self.folder)) for p in self.folder.rglob("*"))

    def shards(self, name="shards", text=None):
        source = self.path(name + ".txt", english(300) if text is None else text)
        self.ok("data", "prepare", "--input", source, "--tokenizer", "byte", "--output",
                self.folder / name)
        return self.folder / name


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


class Eval(Case):
    def test_a_uniform_model_costs_the_logarithm_of_its_vocabulary(self):
        model = write_model(self.folder / "model", uniform=True)
        text = self.path("text.txt", english(200))
        size = text.stat().st_size
        stateful, windows = self.json("eval", "--model", model, "--text", text)
        for result, name in ((stateful, "stateful"), (windows, "windows-64")):
            self.assertEqual(result["metric"], name)
            self.assertEqual((result["tokens"], result["bytes"]), (size, size))
            self.assertEqual(result["words"], 200 + 1)  # the newline at the end
            self.assertAlmostEqual(result["token_perplexity"], VOCAB, delta=1e-3)
            self.assertAlmostEqual(result["byte_perplexity"], VOCAB, delta=1e-3)
            self.assertAlmostEqual(result["bits_per_byte"], math.log2(VOCAB), delta=1e-5)
            self.assertAlmostEqual(math.log(result["word_perplexity"]),
                                   size * math.log(VOCAB) / 201, delta=1e-3)

    def test_shards_and_text_agree_at_any_batch_size(self):
        model = write_model(self.folder / "model")
        shards = self.shards()
        reference = self.json("eval", "--model", model, "--text", self.folder / "shards.txt")
        for batch in ("1", "100", "8192"):
            if batch == "1":
                limit = ["--max-tokens", "100"]
                expected = self.json("eval", "--model", model, "--data", shards, *limit)
            else:
                limit, expected = [], reference
            got = self.json("eval", "--model", model, "--data", shards, "--batch-tokens", batch,
                            *limit)
            for a, b in zip(got, expected, strict=True):
                self.assertEqual(a["metric"], b["metric"])
                self.assertEqual((a["tokens"], a["words"], a["bytes"]),
                                 (b["tokens"], b["words"], b["bytes"]))
                self.assertAlmostEqual(a["nll"] / b["nll"], 1, delta=1e-5)

    def test_the_table_names_both_metrics(self):
        model = write_model(self.folder / "model")
        text = self.path("text.txt", english(50))
        out = self.ok("eval", "--model", model, "--text", text, "--window", "32")
        self.assertIn("stateful", out)
        self.assertIn("windows-32", out)
        self.assertNotIn("windows", self.ok("eval", "--model", model, "--text", text, "--metric",
                                            "stateful"))

    def test_bad_data(self):
        model = write_model(self.folder / "model")
        shards = self.shards()
        run = ["eval", "--model", model]
        self.fails(2, ["--data", "--text"], *run)
        self.fails(2, ["--data", "--text"], *run, "--data", shards, "--text", "x")
        self.fails(1, ["none"], *run, "--data", self.folder / "none")
        self.fails(1, ["none.txt"], *run, "--text", self.folder / "none.txt")
        self.fails(1, ["empty.txt"], *run, "--text", self.path("empty.txt", ""))
        self.fails(1, ["bad.txt", "byte offset 2"], *run, "--text", self.path("bad.txt", b"ab\xff"))
        self.fails(2, ["1000000"], *run, "--data", shards, "--max-tokens", "1000000")
        for option in ("--window", "--max-tokens", "--batch-tokens"):
            for value in ("0", "-4", "1e99", "99999999999999999999"):
                self.fails(2, [option], *run, "--data", shards, option, value)
        self.fails(2, ["--metric"], *run, "--data", shards, "--metric", "accuracy")

    def test_damaged_shards(self):
        model = write_model(self.folder / "model")
        shards = self.shards()
        shard, = shards.glob("*.tok")
        whole = shard.read_bytes()
        for length in (0, 10, 255, 256, len(whole) - 1):
            shard.write_bytes(whole[:length])
            self.fails(1, [shard], "eval", "--model", model, "--data", shards)
            self.fails(1, [shard], "info", shard)
        for position in (0, 9, 20, 100, 300, len(whole) // 2, len(whole) - 20):
            damaged = bytearray(whole)
            damaged[position] ^= 4
            shard.write_bytes(damaged)
            self.fails(1, [shard], "eval", "--model", model, "--data", shards)
        shard.write_bytes(whole)
        self.ok("eval", "--model", model, "--data", shards, "--max-tokens", "50")

    def test_a_tokenizer_that_does_not_match(self):
        model = write_model(self.folder / "model")
        shards = self.shards()
        other = self.folder / "other.model"
        self.ok("tokenizer", "train", "--input", self.path("t.txt", english(3000)), "--vocab-size",
                "300", "--output", other)
        self.fails(2, [other, "300", "258"], "eval", "--model", model, "--data", shards,
                   "--tokenizer", other)
        wide = write_model(self.folder / "wide", vocab=310)
        self.fails(2, [other, wide, self.json("info", other)[0]["fingerprint"],
                       fingerprint("byte tokenizer, version 1")],
                   "generate", "--model", wide, "--prompt", "x", "--tokenizer", other)
        # Byte-sized, but nothing says that it reads bytes.
        unnamed = write_model(self.folder / "unnamed", tokenizer_fingerprint="")
        run = ["generate", "--model", unnamed, "--prompt", "x", "--max-tokens", "3"]
        self.fails(2, [unnamed, "--tokenizer"], *run)
        self.ok(*run, "--tokenizer", "byte")
        shutil.copy(other, model / "tokenizer.model")
        self.fails(2, ["tokenizer.model", "300"], "generate", "--model", model, "--prompt", "x")
        padded = self.folder / "padded"  # as many tokens as the model has, yet not the shards' own
        self.ok("data", "prepare", "--input", self.folder / "t.txt", "--tokenizer", other,
                "--output", padded)
        self.fails(1, [padded, "tokenizer"], "eval", "--model", model, "--data", padded,
                   "--tokenizer", "byte")

    def test_damaged_models(self):
        model = write_model(self.folder / "model")
        weights, config = model / "model.safetensors", model / "config.json"
        whole, text = weights.read_bytes(), config.read_text()
        run = ["generate", "--model", model, "--prompt", "x", "--max-tokens", "3"]
        for length in (0, 7, 100, len(whole) - 1):
            weights.write_bytes(whole[:length])
            self.fails(1, [weights], *run)
        for position in (3, 9, 40):
            damaged = bytearray(whole)
            damaged[position] ^= 0x10
            weights.write_bytes(damaged)
            self.fails(1, [weights], *run)
        weights.unlink()
        self.fails(1, [model, "model.safetensors"], *run)
        weights.write_bytes(whole)
        for change in ({"hidden_size": "32"}, {"hidden_size": -32}, {"num_heads": 0},
                       {"num_hidden_layers": 10**12}, {"vocab_size": 2.5}, {"rule": "exactly"},
                       {"norm_eps": -1}, {"hidden_sise": 32}):
            config.write_text(json.dumps({**json.loads(text), **change}))
            self.fails(2, [config, *change], *run)
        for content in ("", "{", "[]", text[:-20]):
            config.write_text(content)
            code, out, err = efla(*run)
            self.assertIn(code, (1, 2))
            self.assertRegex(err, r"\Aefla: error: [^\n]*config.json[^\n]*\n\Z")
        config.write_text(json.dumps({**json.loads(text), "hidden_size": 64}))
        self.fails(1, [model], *run)
        config.unlink()
        self.fails(2, [model], *run)
        self.fails(1, ["nowhere"], "eval", "--model", self.folder / "nowhere", "--text", "x")

    def test_a_checkpoint_without_the_optimizer(self):
        model = write_checkpoint(self.folder / "model")
        run = ["generate", "--model", model, "--prompt", "x", "--max-tokens", "3"]
        self.ok(*run)
        (model / "optimizer.safetensors").unlink()
        self.ok(*run)
        for name in ("model.safetensors", "config.json"):
            whole = (model / name).read_bytes()
            # Still a valid file: a bit of a weight, another end.
            changed = whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:] if "model" in name else (
                whole + b"\n")
            (model / name).write_bytes(changed)
            self.fails(1, [model / name, "damaged"], *run)
            (model / name).write_bytes(whole)
        (model / "trainer.json").write_text("{")
        self.fails(1, [model / "trainer.json"], *run)

    def test_a_model_whose_writer_was_killed_between_two_renames(self):
        model = write_model(self.folder / "model")
        model.rename(self.folder / "model.old-1234")
        self.ok("generate", "--model", model, "--prompt", "x", "--max-tokens", "3")
        self.assertEqual(self.listing(), ["model", "model/config.json", "model/model.safetensors"])
        model.rename(self.folder / "model.old-1234")
        self.assertEqual(self.json("info", model)[0]["family"], "efla")

    def test_weights_that_are_not_finite(self):
        model = write_model(self.folder / "model", nan=True)
        text = self.path("text.txt", english(20))
        self.fails(1, ["not finite"], "eval", "--model", model, "--text", text)
        self.fails(1, ["not finite"], "generate", "--model", model, "--prompt", "x", "--json")


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
