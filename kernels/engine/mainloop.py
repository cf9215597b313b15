"""The interface of main loops: the part of a matmul kernel that each architecture has its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from stretto.kernels.engine.block import Block
from stretto.kernels.engine.gates import Gates
from stretto.kernels.engine.parts import Product, Ref
from stretto.kernels.engine.tiles import TileShape


class Role(NamedTuple):
    """What some warps of every block do.

    Attributes:
      run: their code.
      warpgroups: how many run it; 0 for a single warp.
      registers: of each of their threads, where the even share is not what they need; single warps
        share warpgroups, and get the largest of their registers.
    """

    run: Callable[[], None]
    warpgroups: int = 0
    registers: int | None = None


class Mainloop(Protocol):
    """Loads, multiplies and stores tiles by the means of one architecture and arithmetic."""

    @property
    def config(self) -> TileShape:
        """How the product is cut up."""
        ...

    @property
    def product(self) -> Product:
        """What it was made for."""
        ...

    @property
    def warpgroups(self) -> int:
        """Warpgroups of its roles, single warps apart."""
        ...

    @property
    def warps(self) -> int:
        """Its roles of a single warp."""
        ...

    def scratch(self) -> Mapping[str, Any]:
        """Shared memory, tensor memory and barriers, by name, for `kernel.launch`."""
        ...

    def roles(
        self, block: Block, gates: Gates | None, scratch: Mapping[str, Ref]
    ) -> Sequence[Role]:
        """What its warps do; called once, first in the kernel, with the refs of `scratch`.

        The loading role goes through the `gates`, if there are any; the storing role calls
        `block.before_stores`.
        """
        ...


type Factory = Callable[[Any, Product], Mainloop]
"""(configuration of the tiles, product) -> the main loop."""
