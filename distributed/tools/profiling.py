"""Profiles of kernels: what each warp of each block did when, recorded by the kernel itself.

A kernel's parts are named by `jax.named_scope`; without a profile a name costs nothing. Only
GPUs record; the simulator has traces of its own.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import pathlib
from collections.abc import Iterator

from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.by_name import by_name


@dataclasses.dataclass(frozen=True)
class _Request:
    folder: pathlib.Path
    events: int


_request: contextvars.ContextVar[_Request | None] = contextvars.ContextVar("profile", default=None)


@by_name
@contextlib.contextmanager
def profiled(folder: pathlib.Path, *, events: int = 64) -> Iterator[None]:
    """Kernels that are traced inside it record a profile when they run.

    Each launch of such a kernel writes a file of trace events into `folder`, of one device of the
    process. It needs `192 * events` bytes of shared memory for a block of three warpgroups, slows
    the kernel a little, and is for a look at a run, not for a time.

    Args:
      folder: an existing folder.
      events: scopes that a warp records, and at most as many are kept: what follows is cut off.
    """
    token = _request.set(_Request(folder, events))
    try:
        yield
    finally:
        _request.reset(token)


def compiler_params(params: plgpu.CompilerParams | None) -> plgpu.CompilerParams:
    """`params` (the defaults if None), with what a profile needs where one is asked for."""
    params = params or plgpu.CompilerParams()
    request = _request.get()
    if request is None:
        return params
    return dataclasses.replace(
        params,
        profile_space=request.events,
        profile_dir=str(request.folder),
        profile_trace_scope=plgpu.TraceScope.WARP,
        profile_bounds_check=True,
    )
