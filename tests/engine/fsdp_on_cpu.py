"""The command `opd` with FSDP2 on a CPU. accelerate shards on accelerators only; the rest of the path is the real one."""

import torch.distributed as dist
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor

import opd.assembly
from opd.cli import main

make_accelerator, assemble = opd.assembly.make_accelerator, opd.assembly.assemble


def make_sharding():
    dist.init_process_group("gloo")
    accelerator = make_accelerator()
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        reshard_after_forward=True,
        state_dict_type="FULL_STATE_DICT",
        cpu_ram_efficient_loading=False,
    )
    accelerator.state.distributed_type = DistributedType.FSDP
    return accelerator


def assemble_and_check(*arguments, **options):
    parts = assemble(*arguments, **options)
    assert all(isinstance(parameter.data, DTensor) for parameter in parts.learner.student.parameters())
    return parts


opd.assembly.make_accelerator = make_sharding
opd.assembly.assemble = assemble_and_check  # type: ignore[assignment]
main()
