"""What each kernel computes and moves: operand blocks, arithmetic, bytes, and how to call it.

Sizes are those of one device's block, `(rows, columns)`; every array is two-dimensional.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import stretto
from stretto.benchmarks.errors import UnavailableError
from stretto.benchmarks.shapes import KERNELS, Shape
from stretto.kernels.choice.dispatch import Problem
from stretto.kernels.problem import reference

type Block = tuple[int, int]

AXIS = "x"
"""The mesh axis that benchmarks run over."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """One public operation, as the benchmarks need to know it.

    `blocks(shape, devices)` are its operands' blocks, `product_blocks` those of the matmul inside
    it (None for a plain collective), `moved_block` the operand of the collective inside it.
    `needs(shape, devices)` are the divisions, as (name, size, divisor), that must come out even.
    """

    name: str
    blocks: Callable[[Shape, int], tuple[Block, ...]]
    product_blocks: Callable[[Shape, int], tuple[Block, Block]] | None
    moved_block: Callable[[Shape, int], Block]
    collective: str
    keywords: dict[str, Any]
    needs: Callable[[Shape, int], tuple[tuple[str, int, int], ...]]

    def public(self, backend: str, config: Any = None) -> Callable[..., jax.Array]:
        """The public operation, a function of one device's blocks inside `shard_map` over `AXIS`.

        Raises:
          UnavailableError: the package does not have the operation.
        """
        function: Callable[..., jax.Array] | None = getattr(stretto, self.name, None)
        if function is None:
            raise UnavailableError(f"stretto.{self.name} is not built")
        keywords = dict(self.keywords, backend=backend)
        if config is not None:
            keywords["config"] = config

        def call(*operands: jax.Array) -> jax.Array:
            return function(*operands, AXIS, **keywords)

        return call

    def unfused(self, *operands: jax.Array) -> jax.Array:
        """The same through XLA's matmul and collectives: the result that others are held to."""
        if self.product_blocks is None:
            return self.communicate(operands[0])
        return getattr(stretto, self.name)(*operands, AXIS, backend="xla")

    def communicate(self, x: jax.Array) -> jax.Array:
        """The collective inside the operation, alone, through XLA (NCCL on GPUs)."""
        keywords = self.keywords if self.product_blocks is None else _keywords(self.collective)
        return getattr(reference, self.collective)(x, AXIS, **keywords)


def _keywords(collective: str) -> dict[str, Any]:
    if collective == "all_to_all":
        return {"split_axis": 0, "concat_axis": 0}
    return {} if collective == "all_reduce" else {"axis": 0}


def _collective(name: str, block: Callable[[Shape, int], Block], needs: Any) -> Operation:
    return Operation(
        name=name,
        blocks=lambda s, d: (block(s, d),),
        product_blocks=None,
        moved_block=block,
        collective=name,
        keywords=_keywords(name),
        needs=needs,
    )


def _reducing(name: str, collective: str, needs: Any) -> Operation:
    def blocks(s: Shape, d: int) -> tuple[Block, Block]:
        return ((s.m, s.k // d), (s.k // d, s.n))

    return Operation(
        name=name,
        blocks=blocks,
        product_blocks=blocks,
        moved_block=lambda s, d: (s.m, s.n),
        collective=collective,
        keywords={},
        needs=needs,
    )


_ALL = (
    Operation(
        name="all_gather_matmul",
        blocks=lambda s, d: ((s.m // d, s.k), (s.k, s.n // d)),
        product_blocks=lambda s, d: ((s.m, s.k), (s.k, s.n // d)),
        moved_block=lambda s, d: (s.m // d, s.k),
        collective="all_gather",
        keywords={},
        needs=lambda s, d: (("m", s.m, d), ("n", s.n, d)),
    ),
    _reducing(
        "matmul_reduce_scatter",
        "reduce_scatter",
        lambda s, d: (("m", s.m, d), ("k", s.k, d)),
    ),
    _reducing("matmul_all_reduce", "all_reduce", lambda s, d: (("k", s.k, d),)),
    _collective("all_gather", lambda s, d: (s.m // d, s.n), lambda s, d: (("m", s.m, d),)),
    _collective("reduce_scatter", lambda s, d: (s.m, s.n), lambda s, d: (("m", s.m, d),)),
    _collective("all_reduce", lambda s, d: (s.m, s.n), lambda s, d: ()),
    _collective("all_to_all", lambda s, d: (s.m // d, s.n), lambda s, d: (("m", s.m, d * d),)),
)

OPERATIONS: dict[str, Operation] = {operation.name: operation for operation in _ALL}


def operation_named(name: str) -> Operation:
    """The `Operation` called `name`; ValueError with the known names if there is none."""
    if name not in OPERATIONS:
        raise ValueError(f"kernel {name!r} is not one of {', '.join(KERNELS)}, all.")
    return OPERATIONS[name]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One problem to time: an operation, a shape, an element type and a number of devices."""

    operation: Operation
    shape: Shape
    dtype: str
    devices: int

    def __str__(self) -> str:
        return f"{self.operation.name} {self.shape} {self.dtype} on {self.devices}"

    def check(self) -> None:
        """Raises UnavailableError if the shape cannot be cut into the devices' blocks."""
        for name, size, divisor in self.operation.needs(self.shape, self.devices):
            if size % divisor:
                raise UnavailableError(f"{name}={size} is not a multiple of {divisor}")

    def problem(self, platform: str, device_kind: str) -> Problem:
        """The case as the choice of an implementation sees it, on such devices."""
        m, k, n = self.shape.m, self.shape.k, self.shape.n
        if self.operation.product_blocks is None:
            m, n = self.blocks[0]
        return Problem(
            op=self.operation.name,
            m=m,
            k=k,
            n=n,
            dtype=self.dtype,
            out_dtype=self.dtype,
            devices=self.devices,
            platform=platform,
            device_kind=device_kind,
        )

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The operands' blocks on one device."""
        return self.operation.blocks(self.shape, self.devices)

    @property
    def flops(self) -> int:
        """Floating-point operations of one device's matmul, 0 for a collective."""
        if self.operation.product_blocks is None:
            return 0
        (m, k), (_, n) = self.operation.product_blocks(self.shape, self.devices)
        return 2 * m * k * n

    @property
    def size(self) -> int:
        """Bytes that nccl-tests calls the size of the collective.

        The gathered array of an all-gather; one device's operand of the others.
        """
        rows, columns = self.operation.moved_block(self.shape, self.devices)
        whole = self.devices if self.operation.collective == "all_gather" else 1
        return rows * columns * self.itemsize * whole

    @property
    def bus_factor(self) -> float:
        """Bytes one device must send, as a share of `size`; nccl-tests' bus bandwidth factor."""
        share = (self.devices - 1) / self.devices
        return 2 * share if self.operation.collective == "all_reduce" else share

    @property
    def sent_bytes(self) -> float:
        """Bytes that one device must send, without reduction in the switch."""
        return self.size * self.bus_factor

    @property
    def footprint(self) -> int:
        """Bytes of one device's operands, gathered or partial tensor, and result."""
        blocks = list(self.blocks)
        if self.operation.product_blocks is not None:
            (m, k), (_, n) = self.operation.product_blocks(self.shape, self.devices)
            blocks += [(m, n)] + ([(m, k)] if self.operation.collective == "all_gather" else [])
        elements = sum(rows * columns for rows, columns in blocks)
        return elements * self.itemsize + self.size
