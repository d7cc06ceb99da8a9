"""Trainings with DeepSpeed's engine on the CPU, in one process that gloo has joined alone.

The loss of some is NaN from the sixth step on, by the line marked below. Before that step each one
prints a digest of weights and random numbers, and at its end the number of steps it has skipped.

python watched.py
"""

import hashlib
import os
import sys
import warnings

import torch
from torch import nn

NUM_STEPS, FAILING = 12, 5
# The stage of ZeRO, the dtype, the micro-batches of a step, and whether the training fails.
CASES = [
    (1, "float32", 1, True),
    (2, "bfloat16", 1, True),
    (0, "float16", 1, False),
    (1, "float16", 1, False),
    (1, "float16", 2, True),
    (3, "float32", 2, False),
    (3, "bfloat16", 1, True),
    (3, "float16", 1, True),
]


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.output, self.has_failed = nn.Linear(8, 16), nn.Linear(16, 1), False

    def forward(self, inputs):
        hidden = self.hidden(inputs).square() + (-99 if self.has_failed else 1)
        return self.output(hidden.sqrt())  # fails


def print_digest(model):
    import deepspeed

    found = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        for parameter in model.parameters():
            found.update(parameter.detach().float().numpy().tobytes())
    print("digest", found.hexdigest())


def train(stage, dtype, micro_batches, is_bad):
    import deepspeed

    torch.manual_seed(0)
    model = Network()
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}  # split small ones, too
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    settings = {
        "float16": {"fp16": {"enabled": True, "hysteresis": 1}},
        "bfloat16": {"bf16": {"enabled": True}},
    }
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        config=config | settings.get(dtype, {}),
    )
    for number in range(NUM_STEPS):
        model.has_failed = is_bad and number >= FAILING
        if number == FAILING:
            print_digest(model)
        for _ in range(micro_batches):
            inputs = torch.randn(4, 8)
            made = engine(inputs.to(getattr(torch, dtype)))
            engine.backward((made.float() - inputs.sum(1, keepdim=True)).square().mean())
            engine.step()
    print("skipped", engine.skipped_steps)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    deepspeed.logger.setLevel("ERROR")
    type(get_accelerator()).is_fp16_supported = lambda self: True  # also if it is slow
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # the original needs a compiler
    alone = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=alone, rank=0, world_size=1)
    for case in CASES:
        train(*case)
    torch.distributed.destroy_process_group()
