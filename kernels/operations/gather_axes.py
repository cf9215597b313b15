"""The three dimensions that an all-gather matmul may gather along: operands, sizes, results.

Of the whole problem, `M x K x N`:

| `gather_axis` | gathers | along its | and the kernel gets it as |
|---|---|---|---|
| "m" | lhs | rows | it is |
| "k" | lhs | columns | it is |
| "n" | rhs | columns | rows of the transposed problem, with lhs as a transposed rhs |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax

from stretto.kernels.choice.dispatch import Kernel
from stretto.kernels.fused import all_gather_matmul, all_gather_matmul_k, all_gather_matmul_n
from stretto.kernels.problem import checks

type GatherAxis = Literal["m", "k", "n"]

OP = "all_gather_matmul"
KERNELS: dict[str, tuple[str, Kernel]] = {
    "m": (OP, all_gather_matmul),
    "k": (f"{OP}_k", all_gather_matmul_k),
    "n": (f"{OP}_n", all_gather_matmul_n),
}


@dataclasses.dataclass(frozen=True)
class Operands:
    """The operands of a call, checked; `sides` are its right-hand sides.

    Attributes:
      gather_axis: "m", "k" or "n".
      lhs, sides: as the caller gave them, the latter as a tuple.
      transposed: whether `sides` are given transposed.
      devices: of the team.
    """

    gather_axis: str
    lhs: jax.Array
    sides: tuple[jax.Array, ...]
    transposed: bool
    devices: int

    @classmethod
    def checked(
        cls, gather_axis: str, lhs: jax.Array, rhs: Any, transposed: bool, devices: int
    ) -> Operands:
        """The operands, if they fit each other.

        Raises:
          ValueError: they do not, or `gather_axis` is unknown, or several right-hand sides are to
            be gathered.
        """
        if gather_axis not in KERNELS:
            known = ", ".join(map(repr, KERNELS))
            raise ValueError(f"{OP}: gather_axis={gather_axis!r} is not one of {known}.")
        sides = checks.as_matrices(OP, "rhs", rhs)
        if gather_axis == "n" and isinstance(rhs, tuple | list):
            raise ValueError(
                f"{OP}: gather_axis='n' gathers rhs and takes one matrix, not a"
                f" {type(rhs).__name__} of {len(rhs)}; call it once for each."
            )
        for side in sides:
            checks.check_matmul_operands(
                OP,
                lhs,
                side,
                rhs_transposed=transposed,
                k_shards=devices if gather_axis == "k" else 1,
            )
        return cls(gather_axis, lhs, sides, transposed, devices)

    @property
    def op(self) -> str:
        """Name of the operation in tables and reports."""
        return KERNELS[self.gather_axis][0]

    @property
    def kernel(self) -> Kernel:
        """What the choice of an implementation asks."""
        return KERNELS[self.gather_axis][1]

    def sizes(self) -> tuple[int, int, int]:
        """m, k, n of the whole problem, over all devices."""
        m, k = self.lhs.shape
        n = sum(side.shape[0 if self.transposed else 1] for side in self.sides)
        if self.gather_axis == "k":
            return m, self.devices * k, self.devices * n
        return self.devices * m, k, self.devices * n

    def for_kernel(self) -> tuple[jax.Array, tuple[jax.Array, ...], bool]:
        """(what is gathered, what it is multiplied by, whether that is transposed)."""
        if self.gather_axis == "n":
            (rhs,) = self.sides
            return rhs if self.transposed else rhs.T, (self.lhs,), True
        return self.lhs, self.sides, self.transposed

    def results(
        self, outs: Sequence[jax.Array], gathered: Any
    ) -> tuple[tuple[jax.Array, ...], Any]:
        """The products and the gathered operand as the caller wants them, from the kernel's."""
        if self.gather_axis == "n":
            if gathered is not None and not self.transposed:
                gathered = gathered.T
            return tuple(out.T for out in outs), gathered
        return tuple(outs), gathered
