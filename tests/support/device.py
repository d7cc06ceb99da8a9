"""A device for the tests that is not the CPU, and that tells when the host reads its memory.

PyTorch takes it for an accelerator of the type ``accel``: an extension in C++ presents the host's
memory as the device's, and runs each operation on the CPU. It is compiled where it is used, which
needs ``g++`` and takes half a minute. Once loaded it stays, so its tests have their own process.
"""

import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

NAME = "accel"
SOURCE = Path(__file__).with_name("device.cpp")


def is_possible():
    """Whether there is a compiler."""
    return shutil.which("g++") is not None


def load():
    """Compile the device, and let PyTorch know it."""
    torch_folder = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        compiled = Path(folder) / "device.so"
        include = [torch_folder / "include", torch_folder / "include/torch/csrc/api/include"]
        command = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", SOURCE, "-o", compiled]
        command += [f"-I{path}" for path in include]
        command += [f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu"]
        subprocess.run(command, check=True)  # pytest shows what the compiler says
        torch.ops.load_library(compiled)
    torch.ops.test_device.register()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend()


def _module():
    """``torch.accel``, with the functions that PyTorch calls in a device's module."""
    module = ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.manual_seed_all = lambda seed: None
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    return module


def reads():
    """How often the host has read the device's memory so far."""
    return torch.ops.test_device.count_reads()


@contextmanager
def forbidden_reads():
    """In the block, reading the device's memory raises RuntimeError."""
    torch.ops.test_device.forbid_reads(True)
    try:
        yield
    finally:
        torch.ops.test_device.forbid_reads(False)
