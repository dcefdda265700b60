"""DDP and FSDP2 over two processes (gloo on the CPU; NCCL where two GPUs are)."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed

WORKER = Path(__file__).with_name("distributed_worker.py")


def torchrun(device):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*command, WORKER, device], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for what in ("DDP", "FSDP2", "FSDP2, bfloat16", "FSDP2 from the meta device"):
        assert done.stdout.count(f"{what}: 24 gradients agree") == 2, done.stdout


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch has no gloo here")
def test_gloo():
    torchrun("cpu")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two GPUs here")
def test_nccl():
    torchrun("cuda")
