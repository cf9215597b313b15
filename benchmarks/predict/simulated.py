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

from stretto.benchmarks.cases.candidate import Candidate
from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.cases.meshes import AXIS
from stretto.benchmarks.errors import UnavailableError
from stretto.benchmarks.timing import programs
from stretto.benchmarks.timing.compiling import Compiler
from stretto.benchmarks.timing.operands import Operands
from stretto.distributed import simulator
from stretto.distributed.simulator.state.cost_model import CostModel
from stretto.kernels.choice.costs import TILE_M, TILE_N
from stretto.kernels.operation import Sizes
from stretto.kernels.problem.machine import MULTIPROCESSORS

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

    def of(self, sizes: Sizes) -> Sizes:
        """The sizes of the small problem."""
        factors = {"m": self.rows, "k": self.depth, "n": self.columns}
        return {name: size // factors.get(name, 1) for name, size in sizes.items()}

    @property
    def blocks(self) -> int:
        """Blocks of a device that stand for all of its multiprocessors."""
        return max(LEAST_BLOCKS, round(MULTIPROCESSORS / (self.rows * self.columns)))


def fused_us(case: Case, model: CostModel | None = None) -> float:
    """The predicted time in microseconds of the fused kernel for `case`.

    Raises:
      UnavailableError: the case is no fused matmul over several devices, or its small problem
        cannot be cut into shares, or there are too few CPU devices.
    """
    if case.work.product is None or case.work.traffic is None or case.devices == 1:
        raise UnavailableError("only fused matmuls over several devices are simulated")
    present = jax.devices("cpu")
    if len(present) < case.devices:
        raise UnavailableError(f"it needs {case.devices} CPU devices and there are {len(present)}")
    scale = scale_of(case)
    small = dataclasses.replace(case, sizes=scale.of(case.sizes))
    small.check()
    mesh = Mesh(np.asarray(present[: case.devices]), (AXIS,))
    candidate = Candidate(body=small.call("simulator"), operands=small.operands)
    with Compiler() as compiler:
        operands = Operands(mesh, case.dtype, compiler).sets(candidate, 1)[0]
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
    if case.work.product is None:
        raise UnavailableError("there is no matmul in it")
    m, k, n = case.work.product
    most = MULTIPROCESSORS // LEAST_BLOCKS
    columns = _halvings(n, LEAST_COLUMNS, most)
    rows = _halvings(m // case.devices, LEAST_ROWS, most // columns)
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
    if case.work.traffic is not None and case.work.traffic.gathers:
        return slowed
    # What travels is the product, not the left operand.
    link = model.link_bandwidth / (scale.rows * scale.columns)
    return dataclasses.replace(slowed, link_bandwidth=link)
