"""Problems and entries of tuned tables, as tests of the choice of a backend make them."""

from __future__ import annotations

from typing import Any

from stretto.kernels.choice import choose as choosing
from stretto.kernels.choice.choice import Choice
from stretto.kernels.choice.tables import Entry
from stretto.kernels.operations import OPERATIONS
from stretto.kernels.problem.machine import Machine
from stretto.kernels.problem.problem import Problem, Types

H100 = "NVIDIA H100 80GB HBM3"


def problem(
    m: int = 8192,
    k: int = 8192,
    n: int = 8192,
    *,
    operation: str = "all_gather_matmul",
    dtype: str = "bfloat16",
    out_dtype: str = "bfloat16",
    devices: int = 4,
    platform: str = "gpu",
    kind: str = H100,
) -> Problem:
    """A matmul on so many H100s."""
    return Problem(
        operation=operation,
        sizes=dict(m=m, k=k, n=n),
        types=Types(lhs=dtype, rhs=dtype, out=out_dtype),
        devices=devices,
        machine=Machine.of_kind(platform, kind),
    )


def entry(m: int = 8192, k: int = 8192, n: int = 8192, **fields: Any) -> Entry:
    """An entry of the table for such a problem."""
    defaults = dict(
        op="all_gather_matmul",
        dtype="bfloat16",
        devices=4,
        fused_us=900.0,
        xla_us=1000.0,
        config={},
    )
    return Entry(sizes=dict(m=m, k=k, n=n), **(defaults | fields))  # pyright: ignore


def choose(problem: Problem, backend: str = "auto", config: Any = None) -> Choice:
    """What `dispatch` makes of a problem."""
    return choosing.choose(OPERATIONS[problem.operation], problem, backend, config)
