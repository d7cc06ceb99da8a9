"""The Trainer of transformers in fp16, with a tiny language model that needs no download.

python examples/transformers_tiny.py

The Trainer's Accelerator constructs a scaler, which is replaced by gradscaler's before `train`. The
model learns to count: each sequence grows by a constant step of its own, modulo 31.
"""

from __future__ import annotations

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from gradscaler.torch import GradScaler

MODULUS = 31
LENGTH = 12


def sequences(count: int) -> list[dict[str, torch.Tensor]]:
    """Random starts and steps, each counted on for ``LENGTH`` tokens."""
    starts, steps = torch.randint(MODULUS, (2, count, 1))
    tokens = (starts + steps * torch.arange(LENGTH)) % MODULUS
    return [{"input_ids": row, "labels": row} for row in tokens]


def main(epochs: int = 12, init_scale: float = 2.0**16) -> float:
    """Train, and return the loss on other sequences; without learning it is 3.4 or more."""
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=MODULUS,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                output_dir=folder,
                fp16=True,
                learning_rate=3e-3,
                per_device_train_batch_size=32,
                num_train_epochs=epochs,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=sequences(800),
            eval_dataset=sequences(200),
        )
        trainer.accelerator.scaler = scaler = GradScaler(init_scale=init_scale)
        trainer.accelerator.native_amp = True  # on the CPU, Accelerate leaves autocast off
        trainer.train()
        loss = float(trainer.evaluate()["eval_loss"])
    skipped = sum(not step.applied for step in scaler.history)
    print(f"loss {loss:.3f}, {skipped} steps skipped, scale {scaler.get_scale():.0f}")
    return loss


if __name__ == "__main__":
    main()
