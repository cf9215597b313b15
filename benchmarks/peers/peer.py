"""One implementation to time, and what its time means."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

from jax.sharding import Mesh

from stretto.benchmarks.cases.candidate import Candidate
from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.errors import UnavailableError
from stretto.kernels.operation import Operation

FUSED = "fused"
XLA = "xla"
MATMUL = "matmul"
COMMUNICATION = "communication"
OTHER = "other"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Peer:
    """One implementation to time.

    Attributes:
      name, label: as options and results name it, and as people do.
      role: what its time means: `FUSED` Stretto's, `XLA` the one to beat, `MATMUL` and
        `COMMUNICATION` the parts that make the floor, `OTHER` another library's.
      candidates: raises `UnavailableError`; None where the times come from the PyTorch helper.
      by_xla: whether XLA generates the code, and may time variants on the device as it compiles.
      on_request: whether it is timed only where it is named.
      serves: the operations that it has; None for all.
      trace_s: seconds that tracing its candidates takes, about.
      is_compared: whether its result is compared with XLA's, though it is not Stretto's.
    """

    name: str
    label: str
    role: str
    candidates: Callable[[Case, Mesh], list[Candidate]] | None
    by_xla: bool = True
    on_request: bool = False
    serves: Collection[Operation] | None = None
    trace_s: float = 0.05
    is_compared: bool = False

    @property
    def is_checked(self) -> bool:
        """Whether its result is held to XLA's."""
        return self.is_compared or self.role == FUSED

    def has(self, operation: Operation) -> bool:
        """Whether it serves an operation."""
        return self.serves is None or operation in self.serves

    def candidates_for(self, case: Case, mesh: Mesh) -> list[Candidate]:
        """What it offers for a case.

        Raises:
          UnavailableError: nothing, and why.
        """
        if not self.has(case.operation):
            raise UnavailableError(f"{self.label} has no such operation")
        if self.candidates is None:
            raise UnavailableError("it runs in a helper process")
        return self.candidates(case, mesh)


def applies(peer: Peer, case: Case) -> bool:
    """Whether `peer` means anything for `case`.

    A plain collective has no parts to time alone, and one device's operation only a matmul.
    """
    if peer.role == MATMUL:
        return case.work.product is not None if peer.serves is None else peer.has(case.operation)
    if peer.role == COMMUNICATION:
        return bool(case.work.flops) and case.work.traffic is not None
    return True
