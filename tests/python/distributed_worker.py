"""Run by torchrun in test_distributed.py: data-parallel gradients equal those of one process."""

import copy
import os
import sys

import efla
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            [
                efla.nn.EFLA(hidden_size=16, num_heads=2, beta_activation="adaptive"),
                efla.nn.GatedEFLA(hidden_size=16, num_heads=1, num_v_heads=3, head_dim=8),
            ]
        )
        self.norm = efla.nn.RMSNorm(16)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.norm(x)


def gradients(model, x):
    """Of the mean of squares; whole tensors under the module's own names."""
    model.zero_grad()
    model(x).square().mul(torch.linspace(0, 1, 16)).mean().backward()
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        found[name.removeprefix("module.")] = whole.clone()
    return found


def compare(found, expected, bound, what):
    for name, gradient in expected.items():
        error = ((found[name] - gradient).norm() / gradient.norm()).item()
        assert error < bound, f"{what}: gradient of {name} is off by {error}"
    print(f"{what}: {len(expected)} gradients agree", flush=True)


def sharded(model, **options):
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def main():
    device = torch.device(sys.argv[1])
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    torch.set_default_device(device)
    torch.manual_seed(0)
    model = Stack()
    x = torch.randn(2 * world, 11, 16)
    mine = x[2 * rank : 2 * rank + 2]
    expected = gradients(copy.deepcopy(model), x)

    compare(gradients(DistributedDataParallel(copy.deepcopy(model)), mine), expected, 1e-5, "DDP")
    compare(gradients(sharded(copy.deepcopy(model)), mine), expected, 1e-5, "FSDP2")
    mixed = sharded(
        copy.deepcopy(model), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    )
    compare(gradients(mixed, mine), expected, 0.1, "FSDP2, bfloat16")

    with torch.device("meta"):
        empty = sharded(Stack())
    empty.to_empty(device=device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(empty, model.state_dict() if rank == 0 else {}, options=options)
    compare(gradients(empty, mine), expected, 1e-5, "FSDP2 from the meta device")
    dist.barrier()
    dist.destroy_process_group()
    # Without Python's shutdown: gloo's threads, which run on because DTensor's caches keep the group, let
    # go of a collective's tensors a little after it returned, and while Python shuts down that aborts.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
