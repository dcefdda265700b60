"""Files go from the Python safetensors package through efla/io and back without a change."""

import os
import subprocess

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

COPY = os.environ["EFLA_SAFETENSORS_COPY"]  # the program of safetensors_copy.cc


def copy(source, target):
    return subprocess.run([COPY, source, target], capture_output=True, text=True)


def sample():
    generator = torch.Generator().manual_seed(1)
    tensors = {
        f"float.{dtype}": torch.randn(3, 5, generator=generator).to(dtype)
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    }
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool):
        tensors[f"int.{dtype}"] = torch.randint(0, 2, (7,), generator=generator).to(dtype)
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.zeros(0, 4)
    tensors["naïve name"] = torch.arange(6).reshape(2, 3)
    return tensors


def test_python_to_efla_to_python(tmp_path):
    source, target = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    tensors = sample()
    safetensors.torch.save_file(tensors, source, metadata={"format": "pt", "note": "x"})
    result = copy(source, target)
    assert result.returncode == 0, result.stderr
    back = safetensors.torch.load_file(target)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor), name
    with safetensors.safe_open(target, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt", "note": "x"}


def test_copy_of_a_copy_is_the_same_file(tmp_path):
    paths = [tmp_path / name for name in "abc"]
    safetensors.torch.save_file(sample(), paths[0], metadata={"format": "pt"})
    for source, target in zip(paths, paths[1:]):
        assert copy(source, target).returncode == 0
    assert paths[1].read_bytes() == paths[2].read_bytes()


def test_both_readers_refuse_the_same_damage(tmp_path):
    path, out = tmp_path / "a", tmp_path / "out"
    safetensors.torch.save_file(sample(), path)
    whole = path.read_bytes()
    cases = [whole[:-1], whole + b"x", whole[:40], whole[:4], b"\xff" * 8 + whole[8:]]
    for case in cases:
        path.write_bytes(case)
        with pytest.raises(safetensors.SafetensorError):
            safetensors.torch.load_file(path)
        result = copy(path, out)
        assert result.returncode == 1
        assert str(path) in result.stderr
        assert not out.exists()


def test_numpy_reads_it_too(tmp_path):
    import safetensors.numpy

    source, target = tmp_path / "a", tmp_path / "b"
    array = np.arange(5, dtype=np.float32)
    safetensors.numpy.save_file({"x": array}, source)
    assert copy(source, target).returncode == 0
    np.testing.assert_array_equal(safetensors.numpy.load_file(target)["x"], array)
