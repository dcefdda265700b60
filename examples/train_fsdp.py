#!/usr/bin/env python3
"""The model of train.py sharded over processes with FSDP2: gloo on CPUs, NCCL on GPUs.

torchrun --standalone --nproc-per-node=2 examples/train_fsdp.py data/austen/train/*.txt --steps 50

Every process reads its own rows; parameters, gradients and optimiser state are split among them. The
weights are drawn after sharding, so that no process ever holds the whole model; --save writes them
whole.
"""

import argparse
import warnings

import torch
import torch.distributed as dist
import train
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def sharded_model(device):
    with torch.device("meta"):
        model = train.Model()
    # Matrices in bfloat16 on GPUs; gradients are summed in float32.
    on_gpu = device.type == "cuda"
    policy = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32) if on_gpu else MixedPrecisionPolicy()
    )
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device=device)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("text", nargs="+")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--save", help="file for the whole state dict")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank = dist.get_rank()
    device = (
        torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    )
    if on_gpu:
        torch.cuda.set_device(device)

    # On GPUs DTensor draws one random sequence over all shards; on CPUs each process draws its own.
    torch.manual_seed(0 if on_gpu else rank)
    warnings.filterwarnings("ignore", message="DTensor random operators")
    model = sharded_model(device)

    def report(line):  # the loss is that of this process's rows
        if rank == 0:
            print(f"{line} (process 0 of {dist.get_world_size()})", flush=True)

    train.train(model, args.text, args.steps, seed=rank, device=device, report=report)
    whole = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if rank == 0 and args.save:
        torch.save(whole, args.save)
        plain = train.Model()
        plain.load_state_dict(whole)
        print(train.write(plain, "It was a truth", 100))
    # Until the file is written nobody leaves; nor would it be safe to: gloo's threads let go of a
    # collective's tensors a little after it returned, and while Python shuts down that aborts.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
