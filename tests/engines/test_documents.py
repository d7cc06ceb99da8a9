"""docs/engines.md: the versions that it names, and its blocks about DeepSpeed and Megatron."""

import re
from importlib.metadata import version
from pathlib import Path

from gradscaler.torch import deepspeed as for_deepspeed
from gradscaler.torch import megatron as for_megatron
from gradscaler.torch import uninstall
from tests.support.engines import (
    MEGATRON_S_FP16,
    batches,
    deepspeed_config,
    megatron,
    megatron_parts,
    network,
    zero_with_fp16,
)

DOCUMENT = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()


def block(engine):
    (code,) = re.findall(rf"<!-- framework: {engine} -->\n```python\n(.*?)```", DOCUMENT, re.S)
    return code


def test_the_document_names_the_versions_that_the_tests_ran_with():
    rows = re.findall(r"^\| `([\w-]+)`.*? \| ([\d.]+) \|", DOCUMENT, re.MULTILINE)
    assert dict(rows) == {
        name: version(name) for name in ("deepspeed", "megatron-core", "accelerate")
    }


def run_deepspeed_s():
    config = deepspeed_config(**zero_with_fp16(1), optimizer={"type": "SGD", "params": {"lr": 0.1}})
    (inputs,) = batches([False], 0)
    names = {"model": network(), "config": config, "inputs": inputs.half()}
    exec(block("deepspeed"), names)
    uninstall("deepspeed")
    return isinstance(names["optimizer"].loss_scaler, for_deepspeed.DynamicLossScaler)


def test_the_block_about_deepspeed_trains_with_ours(ranks):
    assert ranks(1).run(run_deepspeed_s) == [True]


def run_megatron_s():
    with megatron():
        model, optimizer = megatron_parts(False, **MEGATRON_S_FP16)
        (inputs,) = batches([False], 0)
        names = {"model": model, "config": optimizer.config, "inputs": inputs.half()}
        exec(block("megatron"), names)
        uninstall("megatron")
    (inner,) = names["optimizer"].chained_optimizers
    return isinstance(inner.grad_scaler, for_megatron.DynamicGradScaler), names["applied"]


def test_the_block_about_megatron_trains_with_ours(ranks):
    assert ranks(1).run(run_megatron_s) == [(True, True)]
