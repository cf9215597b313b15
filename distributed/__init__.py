"""For kernel authors: teams, remote refs, semaphores, copies, schedules, the entry point.

The tools that they use beside these are found here, too, and are imported when first used.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stretto.distributed.tools import aot, profiling

__all__ = ["aot", "profiling"]


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"stretto.distributed.tools.{name}")
