"""Which main loop serves a configuration of tiles, and with it an architecture."""

from __future__ import annotations

from typing import Any

from stretto.kernels.engine.hopper.matmul import Matmul
from stretto.kernels.engine.hopper.tile_config import TileConfig
from stretto.kernels.engine.mainloop import Mainloop
from stretto.kernels.engine.parts import Product


def mainloop_of(config: Any, product: Product) -> Mainloop:
    """The main loop that `config` is for, whose type stands for an architecture.

    Raises:
      NotImplementedError: there is none for such a configuration, or none that has the product's
        fold.
    """
    if isinstance(config, TileConfig):
        return Matmul(config, product)
    raise NotImplementedError(
        f"tiles={config!r} are for no main loop that is built; pass a {TileConfig.__name__}."
    )
