"""End-to-end tests of `efla convert` and of what `efla info` and the loader say to foreign, broken
and hostile model folders.

Needs only Python's standard library; the program is named by EFLA_PROGRAM. Checkpoints are written
here from the formats' descriptions.
"""

import json
import math
import os
import pathlib
import random
import shutil
import struct
import subprocess
import tempfile
import tomllib
import unittest

PROGRAM = os.environ.get("EFLA_PROGRAM", "efla")
ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TIMEOUT = 120
VOCAB = 50  # of the state-spaces model, padded to 64
D, INNER, STATE, HEADS = 16, 32, 8, 4


def efla(*arguments):
    done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True,
                          timeout=TIMEOUT)
    return done.returncode, done.stdout, done.stderr


def pack(tensors):
    """A safetensors file of float32 tensors: name -> (shape, values)."""
    header, payload, offset = {}, [], 0
    for name, (shape, values) in tensors.items():
        payload.append(struct.pack(f"<{len(values)}f", *values))
        header[name] = {"dtype": "F32", "shape": list(shape),
                        "data_offsets": [offset, offset + 4 * len(values)]}
        offset += 4 * len(values)
    head = json.dumps(header).encode()
    return struct.pack("<Q", len(head)) + head + b"".join(payload)


def unpack(path):
    """name -> (dtype, shape, bytes) of a safetensors file."""
    data = path.read_bytes()
    length, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    header.pop("__metadata__", None)
    return {name: (entry["dtype"], entry["shape"],
                   data[8 + length + entry["data_offsets"][0]:8 + length + entry["data_offsets"][1]])
            for name, entry in header.items()}


def draw(generator, *shape, around=0.0):
    return shape, [generator.gauss(around, 0.3) for _ in range(math.prod(shape))]


def state_spaces_folder(folder, **config):
    """A Mamba-2 checkpoint as state-spaces/mamba names it."""
    generator = random.Random(3)
    conv = INNER + 2 * STATE
    tensors = {"backbone.embedding.weight": draw(generator, 64, D)}
    for layer in range(2):
        name = f"backbone.layers.{layer}."
        tensors |= {
            name + "mixer.dt_bias": draw(generator, HEADS, around=-2),
            name + "mixer.A_log": draw(generator, HEADS),
            name + "mixer.D": draw(generator, HEADS),
            name + "mixer.in_proj.weight": draw(generator, INNER + conv + HEADS, D),
            name + "mixer.conv1d.weight": draw(generator, conv, 1, 4),
            name + "mixer.conv1d.bias": draw(generator, conv),
            name + "mixer.norm.weight": draw(generator, INNER, around=1),
            name + "mixer.out_proj.weight": draw(generator, D, INNER),
            name + "norm.weight": draw(generator, D, around=1)}
    tensors["backbone.norm_f.weight"] = draw(generator, D, around=1)
    tensors["lm_head.weight"] = tensors["backbone.embedding.weight"]
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(pack(tensors))
    (folder / "config.json").write_text(json.dumps({
        "d_model": D, "d_intermediate": 0, "n_layer": 2, "vocab_size": VOCAB,
        "ssm_cfg": {"layer": "Mamba2", "d_state": STATE, "headdim": INNER // HEADS},
        "attn_layer_idx": [], "attn_cfg": {}, "rms_norm": True, "residual_in_fp32": True,
        "fused_add_norm": True, "pad_vocab_size_multiple": 16, "tie_embeddings": True, **config}))
    return folder


def gated_deltanet_folder(folder, fused=False, obsolete=False, **config):
    """A Gated DeltaNet checkpoint in fla's names, optionally as old files are."""
    generator = random.Random(4)
    tensors = {"model.embeddings.weight": draw(generator, 64, D),
               "model.norm.weight": draw(generator, D, around=1),
               "lm_head.weight": draw(generator, 64, D)}
    for layer in range(2):
        name = f"model.layers.{layer}."
        for stream in ("q", "k", "v", "g"):
            tensors[f"{name}attn.{stream}_proj.weight"] = draw(generator, D, D)
        for stream in ("q", "k", "v"):
            tensors[f"{name}attn.{stream}_conv1d.weight"] = draw(generator, D, 1, 4)
        tensors |= {
            name + "attn.a_proj.weight": draw(generator, 2, D),
            name + "attn.b_proj.weight": draw(generator, 2, D),
            name + "attn.A_log": draw(generator, 2),
            name + "attn.dt_bias": draw(generator, 2, around=-2),
            name + "attn.o_norm.weight": draw(generator, D // 2, around=1),
            name + "attn.o_proj.weight": draw(generator, D, D),
            name + "attn_norm.weight": draw(generator, D, around=1),
            name + "mlp_norm.weight": draw(generator, D, around=1),
            name + "mlp.down_proj.weight": draw(generator, D, 24)}
        gate, up = draw(generator, 24, D), draw(generator, 24, D)
        if fused:
            tensors[name + "mlp.gate_proj.weight"] = ((48, D), gate[1] + up[1])
        else:
            tensors |= {name + "mlp.gate_proj.weight": gate, name + "mlp.up_proj.weight": up}
        if obsolete:
            tensors[name + "attn.D"] = draw(random.Random(5), 2)
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(pack(tensors))
    (folder / "config.json").write_text(json.dumps({
        "model_type": "gated_deltanet", "architectures": ["GatedDeltaNetForCausalLM"],
        "hidden_size": D, "num_hidden_layers": 2, "num_heads": 2, "head_dim": D // 2,
        "expand_v": 1, "intermediate_size": 24, "vocab_size": 64, "attn": None,
        **({"norm_first": False} if obsolete else {}), **config}))
    return folder


class Case(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory(prefix="efla_convert_")
        self.addCleanup(holder.cleanup)
        self.folder = pathlib.Path(holder.name)

    def ok(self, *arguments):
        code, out, err = efla(*arguments)
        self.assertEqual(code, 0, err)
        return out

    def convert(self, *arguments):
        return json.loads(self.ok("convert", *arguments, "--json"))

    def fails(self, code, parts, *arguments):
        """The exit code and one sentence on stderr with all `parts`; nothing new is on the disk."""
        before = self.listing()
        got, out, err = efla(*arguments)
        self.assertEqual((got, out), (code, ""), err)
        self.assertRegex(err, r"\Aefla: error: [^\n]{10,2500}\n\Z")
        for part in parts:
            self.assertIn(str(part), err)
        self.assertEqual(self.listing(), before)

    def listing(self):
        return sorted(str(p.relative_to(self.folder)) for p in self.folder.rglob("*"))

    def logits(self, model, *arguments):
        """The bytes of the logits of the verifying forward pass."""
        path = self.folder / "logits.safetensors"
        out = self.folder / "scratch"
        self.convert(model, out, "--logits", path, "--force", *arguments)
        shutil.rmtree(out)
        tensors = unpack(path)
        path.unlink()
        return tensors["logits"]


class Convert(Case):
    def test_state_spaces_to_fla_and_back(self):
        source = state_spaces_folder(self.folder / "mamba")
        result = self.convert(source, self.folder / "fla", "--to", "fla")
        self.assertEqual((result["from_format"], result["same_logits"], result["rounding"]),
                         ("state-spaces", True, 0))
        self.assertIn("50 is padded to 64", " ".join(result["notes"]))
        config = json.loads((self.folder / "fla/config.json").read_text())
        self.assertEqual(
            {key: config[key] for key in ("model_type", "hidden_size", "state_size", "head_dim",
                                          "num_heads", "vocab_size", "tie_word_embeddings")},
            {"model_type": "mamba2", "hidden_size": D, "state_size": STATE,
             "head_dim": INNER // HEADS, "num_heads": HEADS, "vocab_size": 64,
             "tie_word_embeddings": True})
        tensors = unpack(self.folder / "fla/model.safetensors")
        self.assertIn("backbone.embeddings.weight", tensors)
        self.assertNotIn("lm_head.weight", tensors)
        self.assertEqual(self.logits(self.folder / "fla"), self.logits(source))

        self.convert(self.folder / "fla", self.folder / "back", "--to", "state-spaces")
        self.assertEqual(unpack(self.folder / "back/model.safetensors"),
                         unpack(source / "model.safetensors"))
        self.assertEqual(self.logits(self.folder / "back"), self.logits(source))

    def test_old_fla_checkpoints_become_todays(self):
        new = gated_deltanet_folder(self.folder / "new")
        old = gated_deltanet_folder(self.folder / "old", fused=True, obsolete=True)
        result = self.convert(old, self.folder / "out", "--to", "fla")
        self.assertEqual(result["ignored"],
                         ["norm_first", "model.layers.0.attn.D and 1 more of its kind"])
        self.assertIn("2 fused mlp.gate_proj", " ".join(result["notes"]))
        self.assertEqual(unpack(self.folder / "out/model.safetensors"),
                         unpack(new / "model.safetensors"))
        self.assertEqual(self.logits(old), self.logits(new))

    def test_shards_dtypes_and_companions(self):
        source = gated_deltanet_folder(self.folder / "model")
        (source / "tokenizer.json").write_text("{}")
        (source / "optimizer.pt").write_text("not of the model")
        result = self.convert(source, self.folder / "out", "--dtype", "bfloat16", "--shard-size",
                              "4kB")
        self.assertLess(1e-4, result["rounding"])
        self.assertLess(result["rounding"], 0.1)
        index = json.loads((self.folder / "out/model.safetensors.index.json").read_text())
        files = sorted(set(index["weight_map"].values()))
        self.assertGreater(len(files), 2)
        stored = {}
        for name in files:
            self.assertLess((self.folder / "out" / name).stat().st_size, 8000)
            stored |= unpack(self.folder / "out" / name)
        self.assertEqual(sorted(stored), sorted(unpack(source / "model.safetensors")))
        self.assertEqual(stored["model.layers.0.attn.A_log"][0], "F32")
        self.assertEqual(stored["lm_head.weight"][0], "BF16")
        self.assertEqual(sorted(p.name for p in (self.folder / "out").iterdir()),
                         sorted([*files, "config.json", "model.safetensors.index.json",
                                 "tokenizer.json"]))
        facts = json.loads(self.ok("info", self.folder / "out", "--json"))
        self.assertEqual((facts["family"], facts["files"]), ("gated_deltanet", len(files)))
        # Two layers of two heads of 8 x 8 in float32; three convolutions of 16 channels and 4 taps.
        self.assertEqual(facts["state bytes per sequence"], 2 * (2 * 8 * 8 * 4 + 3 * 16 * 4 * 2))
        # float16 and back to one float32 file of the rounded weights.
        self.convert(source, self.folder / "half", "--dtype", "float16")
        self.assertEqual(unpack(self.folder / "half/model.safetensors")["lm_head.weight"][0], "F16")
        self.convert(self.folder / "half", self.folder / "float", "--dtype", "float32")

    def test_given_ids_and_their_logits(self):
        source = gated_deltanet_folder(self.folder / "model")
        ids = self.folder / "ids.safetensors"
        header = json.dumps({"input_ids": {"dtype": "I64", "shape": [1, 3],
                                           "data_offsets": [0, 24]}}).encode()
        ids.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<3q", 5, 0, 63))
        self.assertEqual(self.logits(source, "--verify-ids", ids)[1], [1, 3, 64])
        ids.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<3q", 5, 0, 64))
        self.fails(1, [ids, "64", "0 to 63"], "convert", source, self.folder / "out",
                   "--verify-ids", ids)
        self.fails(1, ["nowhere"], "convert", source, self.folder / "out", "--logits",
                   self.folder / "nowhere/logits.safetensors")

    def test_what_exists_is_kept(self):
        source = gated_deltanet_folder(self.folder / "model")
        self.convert(source, self.folder / "out")
        self.fails(2, ["out", "--force"], "convert", source, self.folder / "out")
        self.convert(source, self.folder / "out", "--force")
        self.fails(2, ["replaced by what is made from it"], "convert", source, source, "--force")
        mine = self.folder / "mine"
        mine.mkdir()
        (mine / "notes.txt").write_text("mine")
        self.fails(2, ["mine", "no model"], "convert", source, mine, "--force")
        self.fails(2, ["notes.txt", "file"], "convert", source, mine / "notes.txt", "--force")

    def test_formats_without_a_place(self):
        source = gated_deltanet_folder(self.folder / "model")
        self.fails(2, ["mamba2"], "convert", source, self.folder / "x", "--to", "state-spaces")
        exact = gated_deltanet_folder(self.folder / "exact", model_type="gated_efla", rule="exact",
                                      use_gate=True)
        self.fails(2, ["gated_efla", "exact"], "convert", exact, self.folder / "x", "--to", "fla")
        euler = gated_deltanet_folder(self.folder / "euler", model_type="gated_efla", rule="euler",
                                      qk_norm="l2")
        self.convert(euler, self.folder / "fla", "--to", "fla")
        self.assertEqual(json.loads((self.folder / "fla/config.json").read_text())["model_type"],
                         "gated_deltanet")
        self.assertEqual(self.logits(self.folder / "fla"), self.logits(source))
        for size in ("0", "-3", "5XB", "many"):
            self.fails(2, [size], "convert", source, self.folder / "x", "--shard-size", size)
        self.fails(2, ["--dtype"], "convert", source, self.folder / "x", "--dtype", "int8")

    def test_weights_that_float16_cannot_hold(self):
        source = gated_deltanet_folder(self.folder / "model")
        data = bytearray((source / "model.safetensors").read_bytes())
        data[-4:] = struct.pack("<f", 1e6)
        (source / "model.safetensors").write_bytes(data)
        self.fails(1, ["float16"], "convert", source, self.folder / "x", "--dtype", "float16")


class BadModels(Case):
    """Each command that reads a model says the same one sentence."""

    def refused(self, code, parts, model):
        for command in (["info", model], ["convert", model, self.folder / "out"],
                        ["generate", "--model", model, "--prompt", "x"]):
            self.fails(code, parts, *command)

    def test_pickles(self):
        model = state_spaces_folder(self.folder / "mamba")
        (model / "model.safetensors").unlink()
        (model / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
        self.refused(1, ["pytorch_model.bin", "pickle", "save_file"], model)

    def test_configs(self):
        for change, code, parts in (
                ({"model_type": "llama"}, 2, ["llama", "transformer"]),
                ({"num_heads": 0}, 2, ["num_heads"]),
                ({"num_v_heads": 3}, 2, ["num_v_heads"]),
                ({"head_dim": 1 << 40}, 2, ["head_dim"]),
                ({"hidden_size": "wide"}, 2, ["hidden_size"]),
                ({"hidden_size": 1 << 17, "num_hidden_layers": 1024, "intermediate_size": 1 << 22}, 2,
                 ["parameters"]),
                ({"hidden_size": 16384, "intermediate_size": 65536}, 1, ["16384"]),
                ({"rope_scaling": {"factor": 2}}, 2, ["rope_scaling"]),
                ({"new\nline": 1}, 1, ["no name"]),
                ({"x" * 100_000: 1}, 1, ["no name"])):
            model = gated_deltanet_folder(self.folder / "model", **change)
            self.refused(code, ["config.json" if code == 2 else "model", *parts], model)
            shutil.rmtree(model)
        model = gated_deltanet_folder(self.folder / "model")
        for text, parts in (("", ["not valid JSON"]), ("{\"a\": ", ["not valid JSON"]),
                            ("[" * 100_000, ["levels"]), ("[]", []),
                            (" " * 5_000_000, ["bytes"])):
            (model / "config.json").write_text(text)
            got, out, err = efla("info", model)
            self.assertIn(got, (1, 2))
            self.assertRegex(err, r"\Aefla: error: [^\n]*config.json[^\n]*\n\Z")
            for part in parts:
                self.assertIn(part, err)

    def test_a_checkpoint_of_another_family(self):
        model = gated_deltanet_folder(self.folder / "model", use_gate=True)
        other = state_spaces_folder(self.folder / "mamba")
        shutil.copy(other / "model.safetensors", model / "model.safetensors")
        self.refused(1, ["missing: model.embeddings.weight", "unexpected: backbone."], model)

    def test_weights(self):
        model = gated_deltanet_folder(self.folder / "model")
        whole = (model / "model.safetensors").read_bytes()
        length, = struct.unpack("<Q", whole[:8])
        header, payload = json.loads(whole[8:8 + length]), whole[8 + length:]

        def write(change):
            changed = json.loads(json.dumps(header))
            change(changed)
            head = json.dumps(changed).encode()
            (model / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + payload)

        name = "model.norm.weight"
        changes = {
            "beyond": lambda h: h[name].update(data_offsets=[0, 1 << 50]),
            "overlap": lambda h: h[name].update(
                data_offsets=[x - 64 for x in h[name]["data_offsets"]]),
            "many dimensions": lambda h: h[name].update(shape=[1] * 1_000_000),
            "huge": lambda h: h[name].update(shape=[1 << 62, 1 << 62]),
            "negative": lambda h: h[name].update(shape=[-16]),
            "integers": lambda h: h[name].update(dtype="I32"),
            "missing": lambda h: h.pop(name),
        }
        for what, change in changes.items():
            with self.subTest(what):
                write(change)
                named = what not in ("missing", "negative", "overlap")
                self.refused(1, [name if named else "model.safetensors"], model)
        for cut in (0, 7, 8, 100, len(whole) - 1):
            (model / "model.safetensors").write_bytes(whole[:cut])
            self.refused(1, ["model.safetensors"], model)
        (model / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + whole[8:])
        self.refused(1, ["claims"], model)

    def test_indexes(self):
        model = gated_deltanet_folder(self.folder / "model")
        names = list(unpack(model / "model.safetensors"))
        secret = self.folder / "secret.safetensors"
        shutil.copy(model / "model.safetensors", secret)
        (model / "model.safetensors").rename(model / "part.safetensors")
        index = model / "model.safetensors.index.json"

        def write(file, **more):
            index.write_text(json.dumps({"weight_map": {**{name: file for name in names}, **more}}))

        write("part.safetensors")
        self.ok("info", model)
        for file in ("../secret.safetensors", str(secret), "", "..", "a\\b.safetensors"):
            write(file)
            self.refused(1, ["no file name"], model)
        write("other.safetensors")
        self.refused(1, ["other.safetensors is missing"], model)
        write("part.safetensors", extra="part.safetensors")
        self.refused(1, ["lacks tensor \"extra\""], model)
        shutil.copy(secret, model / "copy.safetensors")
        write("part.safetensors", **{names[0]: "copy.safetensors"})
        self.refused(1, ["holds too"], model)
        index.write_text('{"weight_map": {"a": "part.safetensors", "a": "part.safetensors"}}')
        self.refused(1, ["twice"], model)
        index.write_text("{")
        self.refused(1, ["not valid JSON"], model)
        os.mkfifo(model / "pipe.safetensors")
        write("pipe.safetensors")
        self.refused(1, ["not a regular file"], model)


FAMILIES = ("efla", "delta_net", "gated_deltanet", "gated_efla", "mamba2", "transformer", "hybrid")


class Recipes(Case):
    def test_every_family_trains_generates_and_converts(self):
        text = self.folder / "text.txt"
        text.write_text("it was the best of rules, it was the worst of rules. " * 40)
        shards = self.folder / "shards"
        self.ok("data", "prepare", "--input", text, "--tokenizer", "byte", "--output", shards)
        for name in FAMILIES:
            run = self.folder / name
            self.ok("train", ROOT / f"configs/{name}.toml", f"data.train={shards}", "data.valid=\"\"",
                    "data.tokenizer=byte", f"train.out={run}", "train.steps=2", "data.length=32",
                    "data.batch=2", "schedule.warmup_steps=1", "train.eval_interval=0",
                    "train.eval_tokens=0", "train.checkpoint_interval=0")
            facts = json.loads(self.ok("info", run, "--json"))
            recipe = tomllib.loads((ROOT / f"configs/{name}.toml").read_text())
            self.assertEqual(facts["family"], recipe["model"]["model_type"])
            # With the quickstart's 2,048 tokens instead of 258 bytes the sizes match within 5 %.
            size = facts["parameters"] + (2048 - 258) * 256
            self.assertAlmostEqual(size / 3.16e6, 1, delta=0.05, msg=name)
            generated = json.loads(self.ok("generate", "--model", run, "--prompt", "it",
                                           "--max-tokens", "3", "--json"))
            self.assertGreaterEqual(len(generated["tokens"]), 1)
            self.convert(run, self.folder / "converted", "--force")

    def test_the_families_differ_in_the_model_alone(self):
        recipes = {name: tomllib.loads((ROOT / f"configs/{name}.toml").read_text())
                   for name in FAMILIES}
        shared = {}
        for name, recipe in recipes.items():
            model = recipe.pop("model")
            self.assertEqual(recipe["train"].pop("out"), f"runs/families/{name}")
            shared.setdefault("rest", recipe)
            self.assertEqual(recipe, shared["rest"], name)
            for key in ("hidden_size", "tie_word_embeddings", "max_position_embeddings"):
                self.assertEqual(model[key], shared.setdefault(key, model[key]), name)


if __name__ == "__main__":
    unittest.main()
