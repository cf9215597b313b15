"""Command line, process start, supervision and the doctor.

The names below are imported when first used, so that the agents that watch over processes start
quickly.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stretto.launch.process.heartbeat import progress
    from stretto.launch.process.startup import Process, initialize

__all__ = ["Process", "initialize", "progress"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "progress":
        return importlib.import_module("stretto.launch.process.heartbeat").progress
    return getattr(importlib.import_module("stretto.launch.process.startup"), name)
