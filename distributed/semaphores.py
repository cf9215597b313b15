"""Semaphores: counters that order what devices, blocks and warpgroups do.

A signal publishes the earlier work of its own warpgroup (or warp); a wait makes that work visible
to the warpgroup (or warp) that waited. Another warpgroup's work is covered only if a barrier inside
the block came between. A bulk copy is covered after a wait for it
(`plgpu.wait_smem_to_gmem(0, wait_read_only=False)`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from numbers import Integral
from typing import Any, Never

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import by_name, settings
from stretto.distributed.memory import heap
from stretto.distributed.memory.mailbox import Site
from stretto.distributed.primitives import heap_semaphores
from stretto.distributed.primitives.bounded_wait import bounded_wait
from stretto.distributed.private_jax import marks
from stretto.distributed.team import Team, are_reversed

LOCAL_PATIENCE = 1.25
"""The factor of the limit for waits for a device's own blocks: such a block may itself wait for
another device, and that wait, which is more informative, should be the reported one."""


@by_name.by_name
@dataclasses.dataclass(frozen=True)
class SemaphoreArray:
    """An array of semaphores for a kernel, all zero when it starts.

    `local` semaphores are signalled by blocks of their own device only, which is cheaper ("gpu"
    scope in place of "sys"). Those with a `heap_word` are in the `heap` at that word, and keep the
    values of the previous launch. An array may be empty, such as one of `team.size - 1` on one
    device.

    `restored` semaphores are zero again when the kernel ends: whoever waits for one subtracts what
    it has waited for (`wait(decrement=True)`), or one warp zeroes an array that several wait for
    (`zero`). Everything that is signalled must be waited for. `kernel.launch` has these in the
    heap, as far as that has words for them, and then XLA has nothing to zero. All kernels have the
    same words there, so peers signal them only after the start of the launch. A kernel that is
    stopped in the middle, such as by a wait past its limit, leaves them as they are. CUDA then ends
    the context of the process, its other kernels cannot run either, and the heap ends with it.

    Raises:
      ValueError: `shape` is no tuple of integers, or one of them is negative.
    """

    shape: tuple[int, ...] = ()
    _: dataclasses.KW_ONLY
    local: bool = False
    restored: bool = False
    heap_word: int | None = None

    def __post_init__(self) -> None:
        shape = self.shape
        if not (
            isinstance(shape, tuple) and all(isinstance(x, Integral) and x >= 0 for x in shape)
        ):
            raise ValueError(
                f"SemaphoreArray({shape!r:.60}): the shape must be a tuple of integers, none of"
                " them negative; () is one semaphore."
            )

    @property
    def size(self) -> int:
        """Number of semaphores."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Semaphore:
    """A semaphore array inside a kernel, or one element of it (`sem.at[i, j]`)."""

    ref: Any
    spec: SemaphoreArray
    site: Site
    team: Team | None
    indices: tuple[int | jax.Array, ...] = ()

    @property
    def at(self) -> _Indexer:
        """`sem.at[i, j]`: one semaphore of the array."""
        return _Indexer(self)

    def signal(
        self,
        *unnamed: Never,
        inc: int | jax.Array = 1,
        peer_id: int | jax.Array | None = None,
    ) -> None:
        """Adds `inc`, on member `peer_id` of the team or, without it, on this device (release).

        Both are passed by name, because a number alone might be either.

        Raises:
          ValueError: a peer's semaphore is signalled and the array is `local`.
          TypeError: one is passed without its name.
        """
        by_name.check("Semaphore.signal", unnamed, ("inc", "peer_id"))
        if peer_id is None:
            scope = "gpu" if self.spec.local else "sys"
            plgpu.semaphore_signal(self._element(), inc, memory_scope=scope)
            return
        if self.spec.local or self.team is None:
            raise ValueError(
                f"semaphore {self.site.semaphore} is local and cannot be signalled on a peer;"
                " declare it with SemaphoreArray(..., local=False) in a kernel with a team."
            )
        device_id = self.team.address(peer_id)
        if self.spec.heap_word is None:
            plgpu.semaphore_signal(self._element(), inc, device_id=device_id)
        else:
            heap_semaphores.signal(
                self._element(), inc, device_id=device_id, reverse=are_reversed()
            )

    def wait(self, value: int | jax.Array = 1, *unnamed: Never, decrement: bool = False) -> None:
        """Waits until the counter is at least `value` (acquire); `decrement` then subtracts it.

        With `decrement` only one warp or warpgroup at a time may wait for a semaphore.
        Past the limit of `settings.wait_limit_s` (for a local semaphore a quarter later) the kernel
        reports the wait (`mailbox`) and stops.
        """
        by_name.check("Semaphore.wait", unnamed, ("decrement",))
        bounded_wait(
            self._element(),
            value,
            indices=self.indices,
            decrement=decrement,
            scope="gpu" if self.spec.local else "sys",
            site=self.site,
            across_devices=self.team is not None and not self.team.is_alone,
        )

    def zero(self) -> None:
        """Sets all semaphores of a `restored` array to 0; called once, by one warp or warpgroup.

        For those that several wait for, so that none of them can subtract. All signals and waits
        must come before. Where XLA zeroes the array it does nothing.

        Raises:
          ValueError: the array is not `restored`.
        """
        if not self.spec.restored or self.indices:
            raise ValueError(
                f"semaphore {self.site.semaphore}: zero() is for an array as a whole, with"
                " SemaphoreArray(..., restored=True)."
            )
        if self.spec.heap_word is not None and self.spec.size:
            heap_semaphores.zero(self.ref)

    def _element(self) -> Any:
        if len(self.indices) != len(self.spec.shape):
            raise ValueError(
                f"semaphore {self.site.semaphore} is an array of shape {self.spec.shape}; name"
                f" one element with .at[...], not {self.indices}."
            )
        return self.ref.at[self.indices] if self.indices else self.ref


@dataclasses.dataclass(frozen=True)
class _Indexer:
    semaphore: Semaphore

    def __getitem__(self, index: Any) -> Semaphore:
        index = index if isinstance(index, tuple) else (index,)
        return dataclasses.replace(self.semaphore, indices=self.semaphore.indices + index)


def in_heap(arrays: Mapping[str, SemaphoreArray]) -> dict[str, SemaphoreArray]:
    """`arrays`, the `restored` ones at words of the heap as far as these suffice."""
    found, word = {}, heap.COUNTERS
    for name, array in arrays.items():
        if array.restored and word + array.size <= heap.WORDS:
            array = dataclasses.replace(array, heap_word=word)
            word += array.size
        found[name] = array
    return found


def allocate(
    name: str,
    spec: SemaphoreArray,
    kernel: str,
    team: Team | None,
    *,
    awaits_start: bool = False,
) -> Semaphore:
    """The semaphores of `spec`, shared by all blocks; called once, first in a kernel's body.

    With `awaits_start` waits for them are for devices to start, which may take longer.
    """
    if spec.size == 0:
        ref = None  # Of which no element can be named.
    elif spec.heap_word is None:
        ref = pl.get_global(plgpu.SemaphoreType.REGULAR(spec.shape))
        marks.name_semaphores(ref, name)
    else:
        ref = heap_semaphores.semaphores(
            spec.shape, spec.heap_word, name=name, reverse=are_reversed()
        )
    if awaits_start:
        limit_s = settings.start_limit_s()
    else:
        limit_s = settings.wait_limit_s() * (LOCAL_PATIENCE if spec.local else 1)
    site = Site(kernel=kernel, semaphore=name, limit_s=limit_s, awaits_start=awaits_start)
    return Semaphore(ref, spec, site, team)
