"""Running the program, and the small models and shards that its tests are given.

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
