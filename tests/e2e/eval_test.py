"""End-to-end tests of `efla eval`: what it prints, and what it says to bad input."""

import json
import math
import shutil
import unittest

from cli_support import Case, VOCAB, efla, english, fingerprint, write_checkpoint, write_model


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




if __name__ == "__main__":
    unittest.main()
