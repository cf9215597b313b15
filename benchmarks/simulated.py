"""A fused matmul's time as the simulator predicts it, from a small problem that stands for a large.

The small problem keeps what the time depends on, the tiles that a block gets and the order in which
shards are wanted, with fewer blocks and shorter products; the rates of the cost model are lowered
as much (`CostModel.scaled`). Needs as many CPU devices as the case has, and no GPU.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh

from stretto.benchmarks import programs
from stretto.benchmarks.compiling import Compiler
from stretto.benchmarks.errors import UnavailableError
from stretto.benchmarks.operations import AXIS, Case
from stretto.benchmarks.programs import Candidate
from stretto.benchmarks.shapes import Shape
from stretto.distributed import simulator
from stretto.distributed.simulator.cost_model import CostModel
from stretto.kernels.costs import BLOCKS, TILE_M, TILE_N

LEAST_ROWS = 2 * TILE_M  # of a shard
LEAST_COLUMNS = TILE_N
LEAST_DEPTH = 1024
LEAST_BLOCKS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """How many times smaller the simulated problem is, along each dimension of the product."""

    rows: int
    columns: int
    depth: int

    @property
    def blocks(self) -> int:
        """Blocks of a device that stand for all of its multiprocessors."""
        return max(LEAST_BLOCKS, round(BLOCKS / (self.rows * self.columns)))


def fused_us(case: Case, model: CostModel | None = None) -> float:
    """The predicted time in microseconds of the fused kernel for `case`.

    Raises:
      UnavailableError: the case is no fused matmul over several devices, or there are too few CPU
        devices.
    """
    if case.operation.product_blocks is None or case.devices == 1:
        raise UnavailableError("only fused matmuls over several devices are simulated")
    present = jax.devices("cpu")
    if len(present) < case.devices:
        raise UnavailableError(f"it needs {case.devices} CPU devices and there are {len(present)}")
    scale = scale_of(case)
    shape = case.shape
    small = Shape(shape.m // scale.rows, shape.k // scale.depth, shape.n // scale.columns)
    mesh = Mesh(np.asarray(present[: case.devices]), (AXIS,))
    small_case = dataclasses.replace(case, shape=small)
    candidate = Candidate(body=case.operation.public("simulator"), blocks=small_case.blocks)
    with Compiler() as compiler:
        operands = programs.Operands(mesh, case.dtype, compiler).sets(candidate, 1)[0]
    with simulator.simulate(
        schedule="time",
        cost_model=_slowed(model or CostModel(), scale, case),
        core_count=scale.blocks,
        detect_races=False,
        check_hardware=False,  # The small problem only stands for the large one.
    ) as report:
        programs.run_once(candidate, mesh, operands).block_until_ready()
    return 1e6 * report.statistics.predicted_seconds


def scale_of(case: Case) -> Scale:
    """How much smaller `case` is simulated: powers of two, one multiprocessor's work kept whole."""
    product_blocks = case.operation.product_blocks
    if product_blocks is None:
        raise UnavailableError("there is no matmul in it")
    (m, k), (_, n) = product_blocks(case.shape, case.devices)
    columns = _halvings(n, LEAST_COLUMNS, BLOCKS // LEAST_BLOCKS)
    rows = _halvings(m // case.devices, LEAST_ROWS, BLOCKS // LEAST_BLOCKS // columns)
    return Scale(rows=rows, columns=columns, depth=_halvings(k, LEAST_DEPTH, k))


def _halvings(size: int, least: int, most: int) -> int:
    """The largest power of two up to `most` that leaves a whole size of at least `least`."""
    factor = 1
    while 2 * factor <= most and size % (2 * factor) == 0 and size // (2 * factor) >= least:
        factor *= 2
    return factor


def _slowed(model: CostModel, scale: Scale, case: Case) -> CostModel:
    """Rates with which the small problem takes the time of the large one."""
    slowed = model.scaled(rows=scale.rows, columns=scale.columns, depth=scale.depth)
    if case.operation.collective == "all_gather":
        return slowed
    # What travels is the product, not the left operand.
    link = model.link_bandwidth / (scale.rows * scale.columns)
    return dataclasses.replace(slowed, link_bandwidth=link)
