"""Devices that dawdle or fail inside a kernel, by replacing `Semaphore.signal`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator

import traces
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.utils import inline_ptx
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.semaphores import Semaphore
from stretto.distributed.team import Team


@contextlib.contextmanager
def signals(replacement: Callable[[Callable, Semaphore], None]) -> Generator[None]:
    """Kernels traced inside call `replacement(send, semaphore)` where they would signal.

    Nothing that was traced before is used inside, nor the other way round.
    """
    original = Semaphore.signal

    def signal(self, *args, **kwargs):
        replacement(lambda: original(self, *args, **kwargs), self)

    Semaphore.signal = signal
    try:
        with traces.apart():
            yield
    finally:
        Semaphore.signal = original


def sleep(microseconds: int) -> None:
    """Inside a kernel for GPUs: keeps the calling warp or warpgroup from going on for so long."""

    @plgpu.inline_mgpu()
    def nanosleep(_ctx):
        inline_ptx(f"nanosleep.u32 {1000 * microseconds};", has_side_effects=True)

    nanosleep()


def sleep_on(team: Team, device: int, microseconds: int) -> None:
    """Inside a kernel for GPUs: `sleep`, on member `device` of the team alone."""
    pl.when(team.device_id() == device)(lambda: sleep(microseconds))


def dropping(device: int, name: str) -> contextlib.AbstractContextManager[None]:
    """Member `device` of the team never signals the semaphores that are called `name`."""

    def maybe(send, semaphore):
        if semaphore.site.semaphore != name:
            send()
        else:
            pl.when(semaphore.team.device_id() != device)(send)

    return signals(maybe)
