"""The public operations, one record each.

`OPERATIONS` is the only list of them: benchmarks, the tuner, tables and tests go through it.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping

from stretto.kernels.operation import Operation
from stretto.kernels.operations import (
    collectives,
    context_parallel,
    experts,
    grouped_matmul,
    matmuls,
    mixture,
    summed_norm,
)
from stretto.kernels.operations import fp8 as fp8

OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        *matmuls.GATHERS.values(),
        matmuls.MATMUL_REDUCE_SCATTER,
        matmuls.MATMUL_ALL_REDUCE,
        grouped_matmul.GROUPED_MATMUL,
        experts.EXPERT_DISPATCH,
        experts.EXPERT_COMBINE,
        mixture.MIXTURE_OF_EXPERTS,
        collectives.ALL_GATHER,
        collectives.REDUCE_SCATTER,
        collectives.ALL_REDUCE,
        collectives.ALL_TO_ALL,
        summed_norm.ALL_REDUCE_RMS_NORM,
        context_parallel.CONTEXT_PARALLEL_ATTENTION,
    )
}

SCALED: dict[str, Operation] = {
    record.name: record
    for records in (
        matmuls.SCALED_GATHER,
        matmuls.SCALED_REDUCE_SCATTER,
        matmuls.SCALED_ALL_REDUCE,
        grouped_matmul.SCALED,
    )
    for record in records.values()
}
"""The operations on operands in 8 bits, by the granularity of their scales. Tables, `stretto bench`
and `stretto tune` have a name for each; their public functions are those of `OPERATIONS`."""

KNOWN: Mapping[str, Operation] = ChainMap(SCALED, OPERATIONS)
