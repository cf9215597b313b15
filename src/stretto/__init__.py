"""Multi-GPU kernels for JAX that overlap communication with arithmetic.

Names are imported when first used: the command line and the processes that watch over a job
import this package too, and do without JAX. Where JAX is in use, the operations are imported at
once, since that must not happen while a function is traced: Pallas adds options to JAX's
configuration, and JAX traces and compiles a function again whose options have changed.
"""

import importlib
import sys
from typing import TYPE_CHECKING

from stretto.distributed.xla_flags import (
    exclude_kernels_from_command_buffers,
    record_runs_of_four,
)
from stretto.launch import environment

if TYPE_CHECKING:
    from stretto.distributed.errors import KernelTimeoutError
    from stretto.distributed.memory.mailbox import kernel_errors
    from stretto.distributed.recording import recorded
    from stretto.distributed.simulator import simulate
    from stretto.kernels.attention.layouts import from_zigzag, to_zigzag, token_positions
    from stretto.kernels.choice.explain import explain
    from stretto.kernels.operations import epilogues, fp8
    from stretto.kernels.operations.collectives import (
        all_gather,
        all_reduce,
        all_to_all,
        reduce_scatter,
    )
    from stretto.kernels.operations.context_parallel import context_parallel_attention
    from stretto.kernels.operations.experts import expert_combine, expert_dispatch
    from stretto.kernels.operations.explain_sizes import explain_sizes
    from stretto.kernels.operations.grouped_matmul import grouped_matmul
    from stretto.kernels.operations.matmuls import (
        all_gather_matmul,
        matmul_all_reduce,
        matmul_reduce_scatter,
    )
    from stretto.kernels.operations.mixture import mixture_of_experts
    from stretto.kernels.operations.sharded import sharded
    from stretto.kernels.operations.summed_norm import all_reduce_rms_norm
    from stretto.kernels.problem.epilogue import Epilogue
    from stretto.kernels.xla.quantisation import quantise
    from stretto.launch.process.startup import initialize

__version__ = "0.1.0"

__all__ = [
    "Epilogue",
    "KernelTimeoutError",
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "all_reduce_rms_norm",
    "all_to_all",
    "context_parallel_attention",
    "epilogues",
    "expert_combine",
    "expert_dispatch",
    "explain",
    "explain_sizes",
    "fp8",
    "from_zigzag",
    "grouped_matmul",
    "initialize",
    "kernel_errors",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "mixture_of_experts",
    "quantise",
    "recorded",
    "reduce_scatter",
    "sharded",
    "simulate",
    "to_zigzag",
    "token_positions",
]

# Public name: the module it lives in.
_MODULES = {
    "Epilogue": "stretto.kernels.problem.epilogue",
    "KernelTimeoutError": "stretto.distributed.errors",
    "all_gather": "stretto.kernels.operations.collectives",
    "all_gather_matmul": "stretto.kernels.operations.matmuls",
    "all_reduce": "stretto.kernels.operations.collectives",
    "all_reduce_rms_norm": "stretto.kernels.operations.summed_norm",
    "all_to_all": "stretto.kernels.operations.collectives",
    "context_parallel_attention": "stretto.kernels.operations.context_parallel",
    "expert_combine": "stretto.kernels.operations.experts",
    "expert_dispatch": "stretto.kernels.operations.experts",
    "epilogues": "stretto.kernels.operations",
    "explain": "stretto.kernels.choice.explain",
    "explain_sizes": "stretto.kernels.operations.explain_sizes",
    "fp8": "stretto.kernels.operations",
    "from_zigzag": "stretto.kernels.attention.layouts",
    "grouped_matmul": "stretto.kernels.operations.grouped_matmul",
    "initialize": "stretto.launch.process.startup",
    "kernel_errors": "stretto.distributed.memory.mailbox",
    "matmul_all_reduce": "stretto.kernels.operations.matmuls",
    "matmul_reduce_scatter": "stretto.kernels.operations.matmuls",
    "mixture_of_experts": "stretto.kernels.operations.mixture",
    "quantise": "stretto.kernels.xla.quantisation",
    "recorded": "stretto.distributed.recording",
    "reduce_scatter": "stretto.kernels.operations.collectives",
    "sharded": "stretto.kernels.operations.sharded",
    "simulate": "stretto.distributed.simulator",
    "to_zigzag": "stretto.kernels.attention.layouts",
    "token_positions": "stretto.kernels.attention.layouts",
}


exclude_kernels_from_command_buffers(environment.own())
record_runs_of_four(environment.own())
if "jax" in sys.modules:
    importlib.import_module("stretto.kernels.operations.matmuls")


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "initialize":  # by scripts whose process had imported this package before JAX
        importlib.import_module("stretto.kernels.operations.matmuls")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
