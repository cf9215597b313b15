"""How many blocks a kernel may have: all wait for each other, so all must be resident at once."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import jax

from stretto.distributed import compiling, settings, simulating
from stretto.distributed.by_name import by_name

# Of a CPU device that simulates one kernel outside `simulate`, which has a setting for it.
SIMULATED_MULTIPROCESSORS = 4
LACKING = 32
"""Multiprocessors that a collective of XLA's takes at most. NCCL 2.28 took 24 of an H200's for an
all-gather of 8 MB, and did not run on 8 or 16."""


@contextlib.contextmanager
def beside_collectives() -> Iterator[None]:
    """Kernels traced inside it leave multiprocessors to XLA's collectives that run beside them.

    A kernel's blocks wait for those of other devices, and so do a collective's. On a device that
    the one has filled the other does not start, and two devices that began with different ones
    wait for each other for ever.
    """
    token = _beside_collectives.set(True)
    try:
        yield
    finally:
        _beside_collectives.reset(token)


_beside_collectives = contextvars.ContextVar("beside_collectives", default=False)


def num_multiprocessors() -> int:
    """Multiprocessors that a kernel may fill: of 132 on an H100, all that are not left free.

    That many are left free that `STRETTO_FREE_MULTIPROCESSORS` says; by default none, and a
    sixteenth inside `beside_collectives`.
    """
    count = _multiprocessors_of_device()
    free = settings.free_multiprocessors()
    if free is None:
        free = count // 16 if _beside_collectives.get() else 0
    return max(1, count - free)


def num_blocks_for(tasks: int, cluster: int = 1) -> int:
    """Blocks for a kernel that has `tasks` for them: all, or one each where those are fewer.

    At least three quarters of all, because every block moves data. With
    some multiprocessors free a kernel starts by counters, which is faster. They are whole
    clusters of `cluster` blocks, each of which takes a task.

    Raises:
      ValueError: there are fewer multiprocessors than a cluster takes.
    """
    count = num_multiprocessors() // cluster
    if not count:
        raise ValueError(
            f"clusters of {cluster} blocks need {cluster} multiprocessors, and a kernel may fill"
            f" {num_multiprocessors()}; leave fewer free, or take tiles of one block."
        )
    return cluster * min(count, max(tasks, count * 3 // 4, 1))


def _multiprocessors_of_device() -> int:
    """Multiprocessors of a device of the enclosing mesh, or of the default one.

    CPU devices have none; the simulator says how many blocks its devices run.
    """
    if simulating.is_simulating():
        return jax.local_devices(backend="cpu")[0].core_count  # `core_count` of `simulate`.
    if (gpus := compiling.current()) is not None:
        return gpus.multiprocessors
    device = jax.sharding.get_abstract_mesh().abstract_device
    count = device.num_cores if device is not None else getattr(jax.devices()[0], "core_count", 0)
    return count or SIMULATED_MULTIPROCESSORS


@by_name
def leaves_room(num_blocks: int, *, all_wait: bool = False) -> bool:
    """Whether something else can run beside a kernel that waits for its peers to start.

    XLA's collectives run beside kernels. One that has begun on a peer, and for which this device is
    full of blocks that wait for that peer, would never end, nor would they. XLA's barrier waits in
    one block, and the collective, which has been ready as long, begins meanwhile.

    Most kernels' blocks wait for few blocks of peers. If some of these have not started, since a
    collective is in their place, most blocks end, and make room for it. Blocks that `all_wait` for
    all of the peers' do not.
    """
    return num_blocks <= most_blocks_beside_others(all_wait=all_wait)


@by_name
def most_blocks_beside_others(*, all_wait: bool = False) -> int:
    """Blocks of a kernel beside which something else can run: a sixteenth of a device is free.

    Of one whose blocks `all_wait` for all of the peers' a quarter is: as much as `LACKING`.
    """
    count = _multiprocessors_of_device()
    return max(1, count - max(1, count // (4 if all_wait else 16)))


def most_blocks_end(num_blocks: int, held_up: int) -> bool:
    """Whether most blocks of a kernel end though `LACKING` blocks of each peer have not started.

    `held_up` are the blocks of this device, for all peers, that each of these holds up.
    """
    return 4 * LACKING * held_up <= 3 * num_blocks


def are_all(devices: int) -> bool:
    """Whether a team of so many devices has all of the enclosing mesh.

    Only then are all devices in the kernel before, in the kernel or in the one after. One that has
    other peers may be late for a reason that has to do with a device full of blocks that wait.
    """
    return jax.sharding.get_abstract_mesh().size == devices
