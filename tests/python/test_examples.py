"""The programs of examples/, as a person runs them but for fewer steps."""

import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path

import efla
import pytest
import torch.distributed
from safetensors.torch import load_file

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the exact flow erases, then writes. " * 60)
    return str(path)


def run(monkeypatch, name, *arguments):
    """In this process, so that torch need not be loaded again."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def losses(output):
    return [float(line.split()[2]) for line in output.splitlines() if line.startswith("step ")]


def test_train(monkeypatch, capsys, text):
    run(monkeypatch, "train.py", text, "--steps", 6, "--batch", 2, "--device", "cpu")
    output = capsys.readouterr().out
    first, last = losses(output)
    assert last < first - 0.1 and "It was a truth" in output


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch has no gloo here")
def test_train_fsdp(text, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         EXAMPLES / "train_fsdp.py", text, "--steps", "3", "--save", tmp_path / "weights.pt"],
        capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "process 0 of 2" in done.stdout and "It was a truth" in done.stdout
    assert len(torch.load(tmp_path / "weights.pt")) == 3 * 14 + 3


@pytest.mark.skipif(
    any(importlib.util.find_spec(m) is None for m in ("transformers", "accelerate")),
    reason="transformers and accelerate are not installed",
)
def test_train_transformers(monkeypatch, capsys, text, tmp_path):
    run(monkeypatch, "train_transformers.py", text, "--out", tmp_path / "run", "--steps", 2)
    assert "It was a truth" in capsys.readouterr().out
    weights = load_file(tmp_path / "run" / "model.safetensors")
    assert "model.layers.2.attn.b_proj.weight" in weights
    assert isinstance(efla.EflaForCausalLM.from_pretrained(tmp_path / "run"), efla.EflaForCausalLM)


def test_compare_integrators(monkeypatch, capsys, tmp_path):
    run(monkeypatch, "compare_integrators.py", "--csv", tmp_path / "t.csv", "--substeps", 10)
    lines = (tmp_path / "t.csv").read_text().splitlines()
    assert lines[0] == "x,euler,rk2,rk4,exact" and len(lines) == 161
    rows = [[float(cell) for cell in line.split(",")] for line in lines[1:]]
    largest = [max(column) for column in zip(*rows)]
    assert largest[1] > 1e2 and largest[2] > 1e2 and largest[3] > 1e2 and largest[4] < 1e-3
    assert rows[0][4] < rows[0][3] < rows[0][2] < rows[0][1]  # the order of the methods
    assert "exact: largest relative error" in capsys.readouterr().out
