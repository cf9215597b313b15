"""Command line, process start, supervision and the doctor.

``Process`` and ``initialize`` are imported when first used, so that the agents that watch over
processes start quickly.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stretto.launch.startup import Process, initialize

__all__ = ["Process", "initialize"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from stretto.launch import startup

    return getattr(startup, name)
