"""DeepSpeed's and Megatron's own code on the CPU, in ranks that gloo joins already.

What stands in for a GPU is here, and nothing of the loss scaling is.
"""

import os
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

INPUTS = 4


def batches(overflows, rank, overflowing_rank=0):
    """One batch for each flag; those that are set overflow fp16, in one rank alone."""
    random = torch.Generator().manual_seed(rank)
    for overflow in overflows:
        batch = torch.randn(2, INPUTS, generator=random)
        yield batch * (1e4 if overflow and rank == overflowing_rank else 1.0)


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(INPUTS, 3), torch.nn.Linear(3, 1))


def deepspeed_engine(**settings):
    """An engine of DeepSpeed's for the network, of which fp16 is true of any CPU."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(DS_ACCELERATOR="cpu", RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world)
    import deepspeed
    import deepspeed.comm.torch
    from deepspeed.accelerator import get_accelerator

    deepspeed.logger.setLevel("ERROR")
    type(get_accelerator()).is_fp16_supported = lambda self: True  # not only where it is fast
    deepspeed.comm.torch.build_shm_op = lambda: None  # which would need a compiler
    model = network()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **settings,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def deepspeed_weights(engine):
    """The weights, of which ZeRO 3 leaves a part in each rank."""
    import deepspeed

    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        return [parameter.tolist() for parameter in parameters]


class _OnTheCPU(TorchFunctionMode):
    """Makes what is made for CUDA on the CPU, and calls its type what CUDA's is called."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        result = function(*args, **kwargs)
        if function is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


@contextmanager
def megatron():
    """Megatron's process groups, with every rank for data parallelism, and the CPU for CUDA."""
    from megatron.core import parallel_state

    current_device, torch.cuda.current_device = torch.cuda.current_device, lambda: "cpu"
    with ExitStack() as stack:
        stack.callback(setattr, torch.cuda, "current_device", current_device)
        parallel_state.initialize_model_parallel()
        stack.callback(parallel_state.destroy_model_parallel)
        stack.enter_context(_OnTheCPU())
        yield
