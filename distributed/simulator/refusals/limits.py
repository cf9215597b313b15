"""Limits of a GPU of compute capability 9.0 or 10.0, checked on a kernel's jaxpr.

Only what is known for certain: a kernel that is reported here runs on no such GPU. Mosaic GPU
itself may need more, such as shared memory for reductions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from stretto.distributed.simulator.reports.flaws import Flaw, equations, inner_jaxprs
from stretto.distributed.simulator.state import registers
from stretto.distributed.simulator.state.allocations import (
    SMEM_ALIGNMENT,
    Allocation,
    allocations_of,
)
from stretto.distributed.sites import (
    UNKNOWN_SITE,
    Site,
    definition_site,
    kernel_site,
    site_of,
)
from stretto.distributed.targets import Target

SHARED_BYTES = 227 * 1024
"""Shared memory of a block."""
BARRIERS = 32
"""Barriers of one array: Mosaic GPU keeps their phases in the bits of a word."""
ARRIVALS = 2**20 - 1
"""Arrivals that a barrier can count in a phase (PTX, `mbarrier.init`)."""
WARPGROUPS = 8
"""Warpgroups of a block: it has at most 1024 threads, and they 128 each."""
CLUSTER_BLOCKS = 16
"""Blocks of a cluster. More than 8 are not promised, but H100s and H200s run them."""


def over_limits(kernel: Any, jaxpr: Any, target: Target) -> list[Flaw]:
    """What `kernel`, a `KernelInfo` whose body is `jaxpr`, asks for beyond what `target` has."""
    found = [
        *_of_launch(kernel, jaxpr),
        *_of_barriers(kernel, jaxpr),
        *_of_registers(kernel, jaxpr),
    ]
    need = _need(jaxpr)
    flaws = _of_shared_memory(kernel, need), _of_tensor_memory(kernel, need, target)
    return [*found, *(flaw for flaw in flaws if flaw is not None)]


def _flaw(kernel: Any, site: Site, message: str) -> Flaw:
    return Flaw("hardware limit", f"kernel {kernel.name}: {message}\n  at {site}", site)


def _of_launch(kernel: Any, jaxpr: Any) -> Iterator[Flaw]:
    warpgroups, cluster = kernel.mesh.num_threads or 1, tuple(kernel.mesh.cluster)
    site = kernel_site(jaxpr)
    if warpgroups > WARPGROUPS:
        yield _flaw(
            kernel, site,
            f"num_threads={warpgroups} warpgroups are {128 * warpgroups} threads, and a block has"
            f" at most {128 * WARPGROUPS}. Take at most {WARPGROUPS}.",
        )  # fmt: skip
    if math.prod(cluster) > CLUSTER_BLOCKS:
        yield _flaw(
            kernel, site,
            f"cluster={cluster} is {math.prod(cluster)} blocks, and a cluster has at most"
            f" {CLUSTER_BLOCKS} (8 on every GPU that has clusters). Take a smaller one.",
        )  # fmt: skip


def _scope_site(eqn: Any) -> Site:
    """Where a `run_scoped` is written; of the kernel's scratch, the function that gets it."""
    site = site_of(eqn)
    return site if site.line else definition_site(eqn.params["jaxpr"])


def _of_barriers(kernel: Any, jaxpr: Any) -> Iterator[Flaw]:
    for eqn in equations(jaxpr):
        if eqn.primitive.name != "run_scoped":
            continue
        for spec in allocations_of(eqn):
            count = math.prod(spec.shape)
            if spec.kind == "barrier" and count > BARRIERS:
                yield _flaw(
                    kernel, _scope_site(eqn),
                    f"{spec.name} is an array of {count} barriers, and one has at most {BARRIERS}."
                    " Take several arrays.",
                )  # fmt: skip
            if spec.kind == "barrier" and _arrivals(spec) > ARRIVALS:
                yield _flaw(
                    kernel, _scope_site(eqn),
                    f"{spec.name} expects num_arrivals={spec.arrivals}, which are"
                    f" {_arrivals(spec)} of threads, and a barrier counts at most {ARRIVALS}."
                    " Let fewer arrive, such as one for each warpgroup.",
                )  # fmt: skip


def _arrivals(spec: Allocation) -> int:
    """Arrivals that the hardware counts: all threads of a warpgroup arrive at most barriers."""
    by_one_thread = spec.orders_tensor_core or spec.cluster_axes
    return spec.arrivals * (1 if by_one_thread else 128)


def _of_registers(kernel: Any, jaxpr: Any) -> Iterator[Flaw]:
    for eqn in equations(jaxpr):
        if eqn.primitive.name.removesuffix("_p") != "set_max_registers":
            continue
        count = eqn.params["n"]
        if not registers.FEWEST <= count <= registers.MOST:
            limits = f"from {registers.FEWEST} to {registers.MOST}"
            message = f"set_max_registers({count}) must be {limits}."
            yield _flaw(kernel, site_of(eqn), message)


# --- Memory of a block ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Need:
    """Shared and tensor memory that is held at once.

    Attributes:
      buffers: (bytes, what) of each buffer.
      barriers: how many arrays of barriers there are of each kind.
      site: the innermost scope that holds some of the buffers.
      tensor: (columns, what) of each allocation of tensor memory.
      tensor_site: the innermost scope that holds some of these.
    """

    buffers: tuple[tuple[int, str], ...] = ()
    barriers: Counter[tuple] = field(default_factory=Counter)
    site: Site = UNKNOWN_SITE
    tensor: tuple[tuple[int, str], ...] = ()
    tensor_site: Site = UNKNOWN_SITE

    @property
    def columns(self) -> int:
        """Columns of tensor memory."""
        return sum(columns for columns, _ in self.tensor)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers, with what lies between them."""
        return sum(-(-size // SMEM_ALIGNMENT) * SMEM_ALIGNMENT for size, _ in self.buffers)

    @property
    def total(self) -> int:
        """All bytes; the first part of a barriers' kind is their number."""
        return self.buffer_bytes + 8 * sum(key[0] * n for key, n in self.barriers.items())

    def or_(self, other: _Need) -> _Need:
        """What serves both, one after the other: barriers stay where they are."""
        larger = max(self, other, key=lambda need: need.buffer_bytes)
        wider = max(self, other, key=lambda need: need.columns)
        barriers = self.barriers | other.barriers
        return _Need(larger.buffers, barriers, larger.site, wider.tensor, wider.tensor_site)


def _of_tensor_memory(kernel: Any, need: _Need, target: Target) -> Flaw | None:
    most = target.tensor_columns
    if need.columns <= most:
        return None
    has = f"has at most {most}" if most else f"{target.title} has none"
    parts = ", ".join(f"{what} {columns}" for columns, what in sorted(need.tensor, reverse=True))
    return _flaw(
        kernel, need.tensor_site,
        f"a block needs {need.columns} columns of tensor memory, and {has}: {parts}.",
    )  # fmt: skip


def _of_shared_memory(kernel: Any, need: _Need) -> Flaw | None:
    if need.total <= SHARED_BYTES:
        return None
    largest = sorted(need.buffers, reverse=True)[:4]
    parts = ", ".join(f"{what} {size}" for size, what in largest)
    return _flaw(
        kernel, need.site,
        f"a block needs {need.total} bytes of shared memory, and has at most {SHARED_BYTES}."
        f" The largest buffers: {parts}. Take smaller or fewer of them.",
    )  # fmt: skip


def _need(jaxpr: Any) -> _Need:
    """The most that a jaxpr holds at once."""
    need = _Need()
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        for inner in inner_jaxprs(eqn):
            one = _need(inner)
            need = need.or_(_in_scope(one, eqn) if eqn.primitive.name == "run_scoped" else one)
    return need


def _in_scope(inner: _Need, eqn: Any) -> _Need:
    """What is held inside a `run_scoped`, of which `inner` is what its body holds itself."""
    specs = allocations_of(eqn)
    own = tuple((spec.num_bytes, spec.describe()) for spec in specs if spec.num_bytes)
    arrays = [
        (math.prod(s.shape), s.arrivals, s.cluster_axes) for s in specs if s.kind == "barrier"
    ]
    site = inner.site if inner.buffers else _scope_site(eqn)
    tensor = tuple((spec.columns, spec.describe()) for spec in specs if spec.columns)
    tensor_site = inner.tensor_site if inner.tensor else _scope_site(eqn)
    return _Need(
        (*own, *inner.buffers),
        Counter(arrays) + inner.barriers,
        site,
        (*tensor, *inner.tensor),
        tensor_site,
    )
