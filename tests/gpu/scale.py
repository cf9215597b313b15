"""How much the GPU tests do: all of it on GPUs, next to nothing in a rehearsal without them."""

from __future__ import annotations

import dataclasses

from stress import Plan
from subjects import Sizes, Subject

from stretto.benchmarks.cases.shapes import SETS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes and counts.

    Attributes:
      backend: of the calls under test.
      largest: rows of the whole problem; larger shapes of the sets are left out.
      middling: m x k x n of a device, for tests of one size.
      small: the same, for tests that compile much or that bring data to the host.
      launches: calls in one program.
      plan: of the stress tests.
    """

    backend: str = "pallas"
    largest: int = 8192
    middling: tuple[int, int, int] = (512, 1024, 512)
    small: tuple[int, int, int] = (65, 72, 136)
    launches: int = 200
    plan: Plan = dataclasses.field(default_factory=Plan)

    @property
    def rehearsed(self) -> bool:
        """Whether nothing but the tests themselves is tested."""
        return self.launches < 200

    def model_shapes(self, subject: Subject, devices: int) -> list[Sizes]:
        """The shapes of models, each once: the sets "square" and "llama-70b"."""
        if self.rehearsed:
            return [subject.sizes_of(devices, 8, 64, 64)]
        shapes = [s for name in ("square", "llama-70b") for s in SETS[name](subject.name, devices)]
        fitting = [s for s in shapes if s.m <= self.largest and max(s.k, s.n) < 4 * self.largest]
        return [(s.m, s.k, s.n) for s in dict.fromkeys(fitting)]

    def awkward_shapes(self, subject: Subject, devices: int) -> list[Sizes]:
        """Sizes that fit nothing: the set "awkward"."""
        if self.rehearsed:
            return [subject.sizes_of(devices, 9, 8, n) for n in (8, 136, 200)]
        return [(s.m, s.k, s.n) for s in SETS["awkward"](subject.name, devices)]

    def gather_shapes(self, subject: Subject, devices: int) -> list[Sizes]:
        """Some of both, for the all-gather matmuls that gather along another dimension."""
        if self.rehearsed:
            return [subject.sizes_of(devices, 9, 8, 24)]
        per_device = [(s.m, s.k, s.n) for s in SETS["awkward-few"]("all_gather_matmul", 1)]
        models = [(2048, 2048, 2048), (8192, 8192, 8192), (2048, 8192, 28672)]
        return [subject.sizes_of(devices, *s) for s in per_device] + models


FULL = Scale()
REHEARSAL = Scale(
    middling=(8, 64, 64),
    small=(9, 8, 24),
    launches=2,
    plan=Plan(sizes=2, rounds=2, unverified=1, largest=16, host_us=2000, kernel_us=0),
)
