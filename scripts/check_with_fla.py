#!/usr/bin/env python3
"""Do checkpoints written here compute the same in flash-linear-attention?

In two steps, because the machine with the GPU need not be the one with the build:

  scripts/check_with_fla.py make FOLDER     trains a small model of every family that fla has with
                                            `efla train`, writes each as fla's checkpoint with the
                                            logits that `efla` computes (needs the built program; CPU)
  scripts/check_with_fla.py check FOLDER    loads them in fla and compares (needs a GPU and
                                            pip install flash-linear-attention; without one
                                            Triton interprets the kernels: ten minutes, numpy < 2.3)

`check` takes any folder whose subfolders are checkpoints with a check.safetensors (input_ids,
logits) beside their weights, as `efla convert MODEL SUB --to fla --logits SUB.logits` gives them.
It prints a table (--markdown: for docs/) and exits with 1 when a checkpoint does not agree: logits
in float32 to 2e-4 relative RMS where fla's kernel takes float32, in bfloat16 to 3e-2.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile

FLOAT32_BOUND = 2e-4
BFLOAT16_BOUND = 3e-2  # two bfloat16 roundings of the same logits; fla's own differ by 1e-2

# What differs between the checkpoints; heads of 64, which every kernel of fla takes.
FAMILIES = {
    "delta_net": ["model.model_type=delta_net", "model.num_heads=2"],
    "delta_net_gate": ["model.model_type=delta_net", "model.num_heads=2", "model.use_gate=true",
                       "model.allow_neg_eigval=true", "model.tie_word_embeddings=true"],
    "gated_deltanet": ["model.model_type=gated_deltanet", "model.num_heads=2", "model.head_dim=64",
                       "model.expand_v=1.0"],
    "gated_deltanet_gva": ["model.model_type=gated_deltanet", "model.num_heads=1",
                           "model.num_v_heads=2", "model.head_dim=64", "model.expand_v=2.0"],
    "mamba2": ["model.model_type=mamba2", "model.head_dim=64", "model.state_size=64"],
    "mamba2_groups": ["model.model_type=mamba2", "model.head_dim=64", "model.state_size=64",
                      "model.n_groups=2"],
    "transformer": ["model.model_type=transformer", "model.num_heads=2"],
    "transformer_gqa": ["model.model_type=transformer", "model.num_heads=2",
                        "model.num_kv_heads=1", "model.qk_norm=true", "model.window_size=32"],
    "hybrid": ["model.model_type=delta_net", "model.num_heads=2", "model.attn.layers=[1]",
               "model.attn.num_heads=2", "model.attn.window_size=32"],
}


def make(folder):
    """Checkpoints of trained models: after some steps with a large rate every weight matters."""
    program = os.environ.get("EFLA_PROGRAM") or shutil.which("efla")
    if not program:
        sys.exit("error: no `efla` program: run scripts/build.sh, then . scripts/env.sh")

    def efla(*arguments):
        done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"error: efla {' '.join(map(str, arguments))}: {done.stderr.strip()}")
        return done.stdout

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        scratch = pathlib.Path(name)
        generator = random.Random(1)
        words = ["".join(generator.choice("aeioubdgklmnprst") for _ in range(5)) for _ in range(99)]
        text = scratch / "text.txt"
        text.write_text(" ".join(generator.choice(words) for _ in range(20000)))
        efla("data", "prepare", "--input", text, "--tokenizer", "byte", "--output",
             scratch / "shards")
        recipe = scratch / "recipe.toml"
        recipe.write_text(f"""
[model]
hidden_size = 128
num_hidden_layers = 2
[data]
train = "{scratch}/shards"
tokenizer = "byte"
length = 128
batch = 4
[optimizer]
learning_rate = 1e-2
[train]
out = "x"
steps = 30
""")
        for family, settings in FAMILIES.items():
            run = scratch / "runs" / family
            mlp = [] if family.startswith("mamba2") else ["model.intermediate_size=256"]
            efla("train", recipe, *settings, *mlp, f"train.out={run}")
            shutil.rmtree(folder / family, ignore_errors=True)
            logits = scratch / f"{family}.safetensors"
            efla("convert", run, folder / family, "--to", "fla", "--logits", logits)
            shutil.move(logits, folder / family / "check.safetensors")
            print(f"{family}: written", flush=True)


def relative_rms(a, b):
    a, b = a.double(), b.double()
    return ((a - b).square().mean().sqrt() / b.square().mean().sqrt()).item()


def without_flash_attention():
    """fla's softmax layer wants flash-attn; without it torch's attention stands in for it."""
    import torch
    from fla.layers import attn

    if attn.flash_attn_func is not None:
        return "flash-attn"

    def attention(q, k, v, causal=True, window_size=(-1, -1), **unused):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        rows = torch.arange(q.shape[2], device=q.device)
        distance = rows[:, None] - rows[None, :]
        mask = distance >= 0
        if window_size[0] >= 0:
            mask = mask & (distance <= window_size[0])
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return o.transpose(1, 2)

    attn.flash_attn_func = attention
    return "torch's attention in place of flash-attn"


def known_difference(path):
    """Why fla itself computes something else than what the checkpoint means; '' for most."""
    from fla.layers import mamba2

    config = json.loads((path / "config.json").read_text())
    if config.get("n_groups", 1) > 1 and not mamba2.is_fast_path_available:
        # Its decode step and mamba_ssm give head h the group h // (heads / groups).
        return "skipped: without mamba_ssm fla gives head h the group h % n_groups"
    return ""


def compare(path, dtype, **settings):
    """(relative RMS of the logits, '') or (None, what does not fit). `settings` go to fla's config;
    fla's own errors pass through."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    saved = load_file(path / "check.safetensors")
    model, loading = AutoModelForCausalLM.from_pretrained(path, dtype=dtype,
                                                          output_loading_info=True, **settings)
    misfits = {kind: sorted(map(str, loading[kind])) for kind in
               ("missing_keys", "unexpected_keys", "mismatched_keys") if loading.get(kind)}
    if model.config.tie_word_embeddings and misfits.get("missing_keys") == ["lm_head.weight"]:
        misfits.pop("missing_keys")
    if misfits:
        return None, f"keys do not fit: {misfits}"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device).eval()
    ids = saved["input_ids"].long().to(device)
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
    return relative_rms(logits.cpu(), saved["logits"]), ""


def measure(path, dtype):
    """compare(), by fla's recurrent kernel where the chunkwise one does not take the dtype."""
    try:
        return compare(path, dtype), ""
    except Exception:  # fla's chunk_delta_rule refuses float32 with an AssertionError
        if "delta" not in json.loads((path / "config.json").read_text())["model_type"]:
            raise
        return compare(path, dtype, attn_mode="fused_recurrent"), " (recurrent)"


def judge(path):
    """The table's cells for float32 and bfloat16, and whether the checkpoint fails."""
    import torch

    skipped = known_difference(path)
    if skipped:
        return [skipped, ""], False
    cells, errors = [], []
    for dtype, bound in ((torch.float32, FLOAT32_BOUND), (torch.bfloat16, BFLOAT16_BOUND)):
        try:
            (error, misfit), kernel = measure(path, dtype)
        except Exception as problem:  # a kernel that refuses a dtype is a result, not the end
            cells.append(f"{type(problem).__name__}: {problem}".split("\n")[0][:90])
            continue
        if misfit:
            return [misfit, ""], True
        errors.append(error / bound)
        cells.append(f"{error:.1e}{kernel}{'' if error <= bound else ' TOO MUCH'}")
    return cells, not errors or max(errors) > 1


def interpret_kernels():
    """Lets Triton run on the CPU: its interpreter, and the first of the configurations that
    autotuning would choose from."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.runtime.autotuner

    triton.runtime.autotuner.Autotuner._bench = lambda self, *args, **meta: [1.0, 1.0, 1.0]


def check(folder, markdown):
    # Or Triton multiplies float32 as TF32 in those kernels of fla that do not say.
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    import torch

    if not torch.cuda.is_available():
        interpret_kernels()
    import fla
    import transformers

    attention = without_flash_attention()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{device}; torch {torch.__version__}; "
          f"fla {getattr(fla, '__version__', '?')}; transformers {transformers.__version__}; "
          f"{attention}\n")
    paths = sorted(p.parent for p in folder.glob("*/check.safetensors"))
    if not paths:
        sys.exit(f"error: {folder} has no subfolder with check.safetensors: run `make` first")
    if markdown:
        print("| checkpoint | model_type | float32 | bfloat16 |\n|---|---|---|---|")
    failed = 0
    for path in paths:
        family = json.loads((path / "config.json").read_text())["model_type"]
        cells, bad = judge(path)
        failed += bad
        if markdown:
            print(f"| {path.name} | {family} | {cells[0]} | {cells[1]} |", flush=True)
        else:
            print(f"{path.name:<20} {family:<16} float32 {cells[0]:<20} bfloat16 {cells[1]}",
                  flush=True)
    print(f"\n{len(paths)} checkpoints, {failed} failures")
    return 1 if failed else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["make", "check"])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--markdown", action="store_true", help="print a table for docs/")
    arguments = parser.parse_args()
    if arguments.step == "make":
        make(arguments.folder)
        return 0
    return check(arguments.folder, arguments.markdown)


if __name__ == "__main__":
    sys.exit(main())
