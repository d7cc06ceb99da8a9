"""DeepSpeed's and Megatron's own code on the CPU, in ranks that gloo has joined.

This module replaces the parts of the engines that need a GPU, but no part of their loss scaling.
"""

import os
import sys
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

INPUTS = 4
FP16 = {
    "enabled": True,
    "initial_scale_power": 10,
    "hysteresis": 2,
    "loss_scale_window": 2,
    "min_loss_scale": 1,
}
# The same rule for Megatron.
MEGATRON_S_FP16 = {"initial_loss_scale": 1024.0, "loss_scale_window": 2, "hysteresis": 2}


def batches(overflows, rank, overflowing_rank=0):
    """One batch for each flag; where the flag is set, it overflows fp16 in one rank."""
    random = torch.Generator().manual_seed(rank)
    for overflow in overflows:
        batch = torch.randn(2, INPUTS, generator=random)
        yield batch * (1e4 if overflow and rank == overflowing_rank else 1.0)


def network():
    """Weights that are the same in each rank."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(INPUTS, 3), torch.nn.Linear(3, 1))


def deepspeed_config(**settings):
    """A configuration for DeepSpeed, which from here on works on the CPU in this rank."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(DS_ACCELERATOR="cpu", RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world)
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime import torch_autocast

    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False  # an engine sets it for all later ones
    deepspeed.logger.setLevel("ERROR")
    type(get_accelerator()).is_fp16_supported = lambda self: True  # also if it is slow
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # the original needs a compiler
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **settings,
    }


def zero_with_fp16(stage, **fp16):
    """Settings of ZeRO, and of fp16 with a rule that acts within a few steps."""
    return {"zero_optimization": {"stage": stage}, "fp16": FP16 | fp16}


def deepspeed_engine(**settings):
    """An engine of DeepSpeed's for the network."""
    config = deepspeed_config(**settings)
    import deepspeed

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def zero(stage, **fp16):
    """An engine with ZeRO and fp16."""
    return deepspeed_engine(**zero_with_fp16(stage, **fp16))


def deepspeed_weights(engine):
    """The whole weights, also if ZeRO 3 keeps only a part of them in each rank."""
    import deepspeed

    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        return [parameter.tolist() for parameter in parameters]


class _OnTheCPU(TorchFunctionMode):
    """Makes tensors for CUDA on the CPU, and reports the types of CUDA's tensors for them."""

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
    """Set up Megatron's process groups for data parallelism, with the CPU in place of CUDA."""
    from megatron.core import parallel_state

    current_device, torch.cuda.current_device = torch.cuda.current_device, lambda: "cpu"
    with ExitStack() as stack:
        stack.callback(setattr, torch.cuda, "current_device", current_device)
        parallel_state.initialize_model_parallel()
        stack.callback(parallel_state.destroy_model_parallel)
        stack.enter_context(_OnTheCPU())
        yield


def megatron_parts(sharded, **settings):
    """A model, and its optimizer: Megatron's, sharded over the ranks or not."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import MegatronModule, TransformerConfig

    half = {"fp16": True, "params_dtype": torch.float16}
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, **half)
    module = MegatronModule(config)
    module.network = network().half()
    module.forward = module.network.forward
    data_parallel = DistributedDataParallelConfig(use_distributed_optimizer=sharded)
    model = DistributedDataParallel(config, data_parallel, module)
    settings = {"optimizer": "adam", "lr": 0.1, "min_loss_scale": 1.0, **settings}
    optimizer_config = OptimizerConfig(use_distributed_optimizer=sharded, **settings, **half)
    return model, get_megatron_optimizer(optimizer_config, [model])
