#!/usr/bin/env python3
"""Trains an EFLA model with transformers' Trainer on the bytes of text files, saves it, generates.

python examples/train_transformers.py data/austen/train/*.txt --out runs/trainer --steps 100

The folder that it writes is one that the program reads: efla info runs/trainer
"""

import argparse
from pathlib import Path

import torch
from efla.models import EflaConfig, EflaForCausalLM
from transformers import Trainer, TrainingArguments


class Windows(torch.utils.data.Dataset):
    """The text in windows of `length` bytes."""

    def __init__(self, paths, length):
        text = b"".join(Path(path).read_bytes() for path in paths)
        count = len(text) // length
        self.rows = torch.frombuffer(bytearray(text[: count * length]), dtype=torch.uint8)
        self.rows = self.rows.view(count, length)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        ids = self.rows[index].long()
        return {"input_ids": ids, "labels": ids}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("text", nargs="+")
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    torch.manual_seed(0)
    config = EflaConfig(
        hidden_size=128, num_hidden_layers=3, num_heads=4, intermediate_size=384, vocab_size=256,
        beta_activation="softplus", conv_initializer_range=0.3, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = EflaForCausalLM(config)
    on_gpu = torch.cuda.is_available()
    training = TrainingArguments(
        output_dir=args.out, max_steps=args.steps, per_device_train_batch_size=8, learning_rate=2e-3,
        lr_scheduler_type="cosine", warmup_steps=args.steps // 10, weight_decay=0.1, logging_steps=20,
        save_strategy="no", report_to=[], bf16=on_gpu, use_cpu=not on_gpu, seed=0,
    )  # fmt: skip
    Trainer(model=model, args=training, train_dataset=Windows(args.text, 256)).train()
    model.save_pretrained(args.out)
    prompt = torch.tensor([list(b"It was a truth")], device=model.device)
    ids = model.generate(
        prompt, max_new_tokens=200, do_sample=True, temperature=0.8, pad_token_id=0
    )
    print(bytes(ids[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
