"""`out = epilogue(lhs @ all_gather(rhs))`, rhs gathered along its columns: no kernel of its own.

It is the transpose of an all-gather matmul, `out^T = epilogue(all_gather(rhs^T) @ lhs^T)`, and so
the kernel of `all_gather_matmul` serves it, with `lhs` as a transposed right-hand side. The public
operation transposes the result and, unless rhs is given transposed, the device's own shard of rhs.
Of the result XLA changes the layout: nothing moves where its user takes either, as matmuls do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from stretto.kernels.engine import padding
from stretto.kernels.fused import all_gather_matmul, copied, unfused
from stretto.kernels.fused.all_gather_matmul import Config
from stretto.kernels.problem.problem import Problem


def default_config(problem: Problem) -> Config:
    """The configuration of the transposed problem."""
    return all_gather_matmul.default_config(transposed(problem)[0])


def candidates(problem: Problem | None = None) -> Iterator[Config]:
    """Those of the transposed problem."""
    return Config.candidates(None if problem is None else transposed(problem)[0])


def transposed(problem: Problem) -> tuple[Problem, int]:
    """The transposed problem, and the bytes that XLA transposes: rhs, and a result that it cuts.

    On two H200s results of 4264 x 22176 and 6960 x 46880 were not transposed, of 16 and 32 numbers
    a product: 55 and 123 us, where the transpose alone takes 79 and 272. Of five with shards of
    columns that are no multiples of 16 bytes, all were.
    """
    m, k, n = (problem.sizes[name] for name in "mkn")
    is_cut = n // problem.devices % padding.ROWS > 0
    moved = k * n // problem.devices + is_cut * (m // problem.devices * n)
    other = dataclasses.replace(problem.resized(m=n, n=m), operation="all_gather_matmul")
    return other, moved * problem.types.itemsize


KERNEL = dataclasses.replace(
    all_gather_matmul.KERNEL,
    default=default_config,
    candidates=candidates,
    stands_for=transposed,
    copies=lambda problem, config: copied.by_rows(transposed(problem)[0], config),
    apart=unfused.by_gather(Config(unfused=True), "n"),
)
