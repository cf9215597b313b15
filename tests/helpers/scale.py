"""How much the GPU tests do: all of it on GPUs, next to nothing in a rehearsal without them."""

from __future__ import annotations

import dataclasses

from stress import Plan
from subjects import Sizes, Subject

from stretto.kernels.operations import OPERATIONS


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
        shapes = [s for name in ("square", "llama-70b") for s in _set(name, subject.name, devices)]
        most = 4 * self.largest
        fitting = [(m, k, n) for m, k, n in shapes if m <= self.largest and max(k, n) < most]
        return list(dict.fromkeys(fitting))

    def awkward_shapes(self, subject: Subject, devices: int) -> list[Sizes]:
        """Sizes that fit nothing: the set "awkward"."""
        if self.rehearsed:
            return [subject.sizes_of(devices, 9, 8, n) for n in (8, 136, 200)]
        return _set("awkward", subject.name, devices)

    def gather_shapes(self, subject: Subject, devices: int) -> list[Sizes]:
        """Some of both, for the all-gather matmuls that gather along another dimension."""
        if self.rehearsed:
            return [subject.sizes_of(devices, 9, 8, 24)]
        per_device = _set("awkward-few", "all_gather_matmul", 1)
        models = [(2048, 2048, 2048), (8192, 8192, 8192), (2048, 8192, 28672)]
        return [subject.sizes_of(devices, *s) for s in per_device] + models


def _set(name: str, operation: str, devices: int) -> list[Sizes]:
    """m, k and n of the shapes of a set; k is 0 where the operation has none."""
    found = OPERATIONS[operation].examples.shapes(name, devices)
    return [(sizes["m"], sizes.get("k", 0), sizes["n"]) for sizes in found]


FULL = Scale()
REHEARSAL = Scale(
    middling=(8, 64, 64),
    small=(9, 8, 24),
    launches=2,
    plan=Plan(sizes=2, rounds=2, unverified=1, largest=16, host_us=2000, kernel_us=0),
)
