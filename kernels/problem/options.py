"""The arguments of the matmuls besides their operands."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from stretto.kernels.problem.epilogue import Form
from stretto.kernels.problem.problem import Types
from stretto.kernels.problem.scales import Granularity


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulOptions:
    """Of every matmul.

    Attributes:
      out_dtype: type of the result.
      rhs_transposed: rhs is given as `[n, k]`.
      epilogue: the function of the float32 product; its arrays are operands.
      scales: of operands in 8 bits, the granularity; None without scales.
      of_tensors: each operand has one scale, spread to all of that granularity.
      blocks: of rows, equal ones, that a device's rows consist of, as of a batch. In the whole
        matrix, of all devices' rows, block follows block. In what a kernel gathers and returns
        beside the result, device follows device.
    """

    out_dtype: Any
    rhs_transposed: bool = False
    epilogue: Form | None = None
    scales: Granularity | None = None
    of_tensors: bool = False
    blocks: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScatterOptions(MatmulOptions):
    """Of a matmul whose result is scattered.

    Attributes:
      axis: of the result, along which it is scattered.
    """

    axis: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatherOptions(MatmulOptions):
    """Of an all-gather matmul.

    Attributes:
      axis: of lhs, along which it is gathered.
      return_gathered: whether the gathered operand is a result.
      keep_gathered: whether the backward pass keeps it, in place of gathering it again.
    """

    axis: int = 0
    return_gathered: bool = False
    keep_gathered: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedOptions(MatmulOptions):
    """Of a matmul of groups of rows.

    Attributes:
      zeros: rows of no group are zero; or they are undefined, and take no time.
    """

    zeros: bool = True


def types_of(lhs: jax.Array, rhs: jax.Array, options: MatmulOptions) -> Types:
    """The types of a matmul's call."""
    return Types(
        lhs=str(lhs.dtype),
        rhs=str(rhs.dtype),
        out=str(options.out_dtype),
        scales=options.scales,
    )
