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
"""The same operations of operands in 8 bits with scales, by the granularity of these: what tables,
`stretto bench` and `stretto tune` know by a name of its own. They are no more public functions."""

KNOWN: Mapping[str, Operation] = ChainMap(SCALED, OPERATIONS)
