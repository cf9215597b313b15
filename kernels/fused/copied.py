"""Bytes that XLA copies for a fused matmul because of its sizes (`padding`); 0 for most sizes."""

from __future__ import annotations

import math
from typing import Any

from stretto.distributed.schedule import ceil_div
from stretto.kernels.engine import padding
from stretto.kernels.problem.problem import Problem

type Shape = tuple[int, int]


def of_matrices(problem: Problem, config: Any, lhs: Shape, rhs: Shape, out: Shape) -> int:
    """Bytes of the operands that are padded, and of the result that is cut out of a larger one.

    Args:
      problem: whose types the matrices have.
      config: of the kernel; with `unfused` set, XLA multiplies and nothing is copied.
      lhs, rhs, out: rows and columns on a device; rhs `[k, n]`.
    """
    if getattr(config, "unfused", False):
        return 0
    m, n = out[0] if out[0] > lhs[0] else lhs[0], rhs[1]
    made_lhs, of_lhs = _operand(problem, config, "lhs", lhs, n)
    made_rhs, of_rhs = _operand(problem, config, "rhs", rhs, m)
    row = padding.ROW_BYTES // problem.types.itemsize
    fits = config.tiles.takes_edges and not rhs[1] % row
    if fits or (made_lhs[0], made_rhs[1]) == (lhs[0], rhs[1]):
        return of_lhs + of_rhs
    return of_lhs + of_rhs + math.prod(out) * problem.types.out_itemsize


def _operand(
    problem: Problem, config: Any, name: str, shape: Shape, uses: int
) -> tuple[Shape, int]:
    """The shape that an operand is padded to, and the bytes of it that are copied.

    And, where its rows are not aligned, the bytes whose copy would take as long as the product
    takes longer, beyond what XLA's matmul loses by such rows: at as many uses as `USES_OF_A_COPY`
    those of the operand, and in proportion; by pairs of blocks none.
    """
    tiles, itemsize, often = config.tiles, problem.types.itemsize, padding.REUSE[name]
    rows = padding.ROWS if name == "lhs" else padding.COLUMNS
    made = padding.shape_of(shape, problem.types.lhs, tiles, rows, copied=uses >= often)
    size = math.prod(made) * itemsize
    aligned = padding.in_lines(made[1], problem.types.lhs) == made[1]
    loses_as_xla = aligned or tiles.blocks > 1
    lost = 0 if loses_as_xla else size * uses // padding.USES_OF_A_COPY[name]
    return made, lost + size * (made != shape)


def by_rows(problem: Problem, config: Any) -> int:
    """The same of an all-gather matmul, by rows: `[m / D, k]`, `[k, n / D]` -> `[m, n / D]`."""
    m, k, n = (problem.sizes[name] for name in "mkn")
    rows, columns = ceil_div(m, problem.devices), ceil_div(n, problem.devices)
    moved = of_matrices(problem, config, (rows, k), (k, columns), (m, columns))
    gathered_rows = getattr(config, "gathered_rows", None)
    if moved or gathered_rows is None or config.unfused or gathered_rows(rows) == rows:
        return moved
    return rows * k * problem.types.itemsize + m * columns * problem.types.out_itemsize


def by_contraction(problem: Problem, config: Any) -> int:
    """The same for a gather along the contraction: `[m, k / D]`, `[k, n / D]` -> `[m, n / D]`."""
    m, k, n = (problem.sizes[name] for name in "mkn")
    part, columns = ceil_div(k, problem.devices), ceil_div(n, problem.devices)
    return of_matrices(problem, config, (m, part), (k, columns), (m, columns))


def scattered(problem: Problem, config: Any) -> int:
    """The same of a reduction: `[m, k / D]`, `[k / D, n]` -> `[m / D, n]`."""
    m, k, n = (problem.sizes[name] for name in "mkn")
    part, rows = ceil_div(k, problem.devices), ceil_div(m, problem.devices)
    return of_matrices(problem, config, (m, part), (part, n), (rows, n))


def everywhere(problem: Problem, config: Any) -> int:
    """The same of an all-reduce, whose result is cut where devices cannot share its rows evenly."""
    m, n = problem.sizes["m"], problem.sizes["n"]
    moved = scattered(problem, config)
    if getattr(config, "unfused", False) or not m % problem.devices:
        return moved
    return moved + m * n * problem.types.out_itemsize


def one_device(problem: Problem, config: Any) -> int:
    """The same of rows in groups, which are padded to whole tiles: `[m, k]`, `[g, k, n]`."""
    m, k, n, groups = (problem.sizes[name] for name in "mkng")
    new = [padding.padded(m, padding.ROWS), *(padding.padded(x, padding.COLUMNS) for x in (k, n))]
    itemsize = problem.types.itemsize
    moved = m * k * itemsize * ([m, k] != new[:2]) + groups * k * n * itemsize * ([k, n] != new[1:])
    return moved + m * n * problem.types.out_itemsize * ([m, n] != [new[0], new[2]])
