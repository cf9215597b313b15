"""The entry point of a kernel that a team of devices runs together."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import arguments, handshake, residency, semaphores, simulating
from stretto.distributed.devices import clique
from stretto.distributed.devices.axes import make_varying, varying_axes
from stretto.distributed.handshake import Handshake
from stretto.distributed.memory import heap
from stretto.distributed.primitives import team_kernel
from stretto.distributed.primitives.team_kernel import TeamKernelInfo
from stretto.distributed.semaphores import SemaphoreArray
from stretto.distributed.team import Team, places_reversed
from stretto.distributed.tools import profiling

# Names that no mesh axis has, which a kernel inside `shard_map` would hide.
GRID_AXIS = "stretto_grid"
CLUSTER_AXIS = "stretto_cluster"
THREAD_AXIS = "stretto_warpgroup"


def launch(
    body: Callable[..., None],
    *operands: jax.Array,
    name: str,
    team: Team | None,
    out_type: Sequence[jax.ShapeDtypeStruct],
    num_blocks: int,
    num_threads: int = 1,
    cluster: int = 1,
    symmetric: Sequence[jax.ShapeDtypeStruct] = (),
    semaphore_arrays: Mapping[str, SemaphoreArray] | None = None,
    scratch: Mapping[str, Any] | None = None,
    waiting_warps: int = 0,
    all_wait: bool = True,
    fills: bool = False,
    invariant: bool = False,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Any = None,
) -> list[jax.Array]:
    """Runs `body` in `num_blocks` blocks of `num_threads` warpgroups on every device of `team`.

    `body(*operand_refs, *out_refs, *symmetric_refs, **semaphores, **scratch_refs)` is Pallas code;
    inside it `block_id()` is the block, `lax.axis_index(THREAD_AXIS)` the warpgroup, and
    `team.device_id()` the device. All operands, outputs and symmetric buffers are in global memory
    and may be reached by peers through `copies.remote`. Unless `waiting_warps`: when `body`
    starts, every peer has started too, and its operands are ready to be read; when `body` ends,
    the launch waits for the bulk stores of each warpgroup, and block 0 for all peers (`handshake`),
    before any buffer is used again. Without a team the body itself waits for its bulk stores.

    Args:
      body: the kernel. Its numbers have 32 bits by default, also under `jax_enable_x64`.
      *operands: arrays, this device's shards.
      name: of the kernel, in reports and profiles.
      team: the devices that run it together; None for a kernel on one device.
      out_type: shape and type of each result, per device.
      num_blocks: at most `num_multiprocessors()`, so that all blocks are resident: blocks wait for
        each other.
      num_threads: warpgroups in a block.
      cluster: blocks that follow each other and form a cluster, along `CLUSTER_AXIS` if there are
        several; divides `num_blocks`.
      symmetric: buffers that peers may write, uninitialised; not returned.
      semaphore_arrays: by name; all zero at the start. Without any, or with `restored` ones alone,
        XLA launches nothing before the kernel that zeroes them.
      scratch: shared memory, barriers, by name: the `scratch_types` of `plgpu.kernel`.
      waiting_warps: more than 0 for a body that starts before its peers have started, and has a
        parameter `handshake`. That many warps (or warpgroups, each counted once) of each block must
        call `handshake.wait()` before they access a peer's memory. One warp of block 0 must call
        `arrive()` before that (`arrive_and_wait()` does both), and `wait_at_end()` at the end. The
        kernel may only end once no peer uses this device's buffers. With XLA's barrier before the
        kernel the calls do nothing, and a missing call is not noticed: simulate with a `core_count`
        above `num_blocks`.
      all_wait: blocks may wait, before they end, for all blocks of the peers, or for so many that
        few end if some do not start. Such a kernel starts by counters only if it leaves a quarter
        of the multiprocessors free, another one if it leaves a sixteenth (`residency`).
      fills: most blocks end though some of the peers' do not start. If the team has all devices
        of the mesh, such a kernel fills the device and starts by counters all the same. That is
        faster if it has work to do before its peers have started.
      invariant: all members of the team compute bitwise the same results, which are then typed as
        not varying over the team's axes.
      compiler_params: passed on to Pallas.
      interpret: `simulator.SimulatorParams()` to run this one kernel in the simulator.

    Returns:
      The results, in the order of `out_type`; typed as varying over the team's axes, and over those
      that any operand varies over.

    Raises:
      ValueError: a number of blocks that cannot be resident together, or that are not whole
        clusters; `waiting_warps` that is negative or without a team; an array without elements; a
        name that is given twice or that is the launch's own; bulk stores that may continue past an
        edge (`windows`); a body that calls `lax.axis_index` of a mesh axis.
      TypeError: an argument of another type than the above.
      NotImplementedError: operands or results whose elements are wider than 32 bits.
    """
    arguments.check_names(name, team, semaphore_arrays or {}, scratch or {})
    arrays, scratch = dict(semaphore_arrays or {}), dict(scratch or {})
    arguments.check_counts(name, num_blocks, cluster, num_threads, waiting_warps, team)
    arguments.check_body(name, body, waiting_warps)
    operands = arguments.as_arrays(operands)
    arguments.check_arrays(name, operands, out_type, symmetric)
    together = team is not None and not team.is_alone
    around = together and not waiting_warps
    if together and heap.is_wanted():
        arrays = semaphores.in_heap(arrays)
    fills = fills and team is not None and residency.are_all(team.size)
    leaves_room = fills or residency.leaves_room(num_blocks, all_wait=all_wait)
    opens_itself = heap.is_wanted() and leaves_room
    if around:
        scratch["block_done"] = plgpu.Barrier(num_arrivals=num_threads)

    axes = team.axes if team is not None else ()
    reverse = clique.are_several() or simulating.counts_from_the_end()
    info = TeamKernelInfo(name=name, axes=axes, reverse=bool(axes) and reverse)

    @places_reversed(info.reverse)
    @_in_clusters_of(cluster)
    @functools.wraps(body)  # So that the simulator finds the buffers' names.
    def whole_body(*refs: Any, **scratch_refs: Any) -> None:
        sems = {key: semaphores.allocate(key, a, name, team) for key, a in arrays.items()}
        if team is None:
            body(*refs, **sems, **scratch_refs)
            return
        parties = num_blocks * (num_threads if around else waiting_warps)
        meeting = handshake.make(
            name,
            team,
            block_id(),
            num_blocks=num_blocks,
            parties=parties,
            opens=opens_itself,
            closes=around,
        )
        if not around:
            extra = dict(handshake=meeting) if waiting_warps else {}
            body(*refs, **sems, **scratch_refs, **extra)
            if not waiting_warps:  # A team of one device: its own stores.
                _complete_stores()
            return
        block_done = scratch_refs.pop("block_done")
        _open(meeting)
        body(*refs, **sems, **scratch_refs)
        _close(meeting, block_done)

    whole_body.__name__ = name
    call = plgpu.kernel(
        whole_body,
        out_type=[*out_type, *symmetric],
        scratch_types=scratch,
        grid=(num_blocks // cluster,),
        grid_names=(GRID_AXIS,),
        cluster=(cluster,) if cluster > 1 else (),
        cluster_names=(CLUSTER_AXIS,) if cluster > 1 else (),
        num_threads=num_threads,
        thread_name=THREAD_AXIS,
        kernel_name=name,
        compiler_params=_compiler_params(compiler_params, together and opens_itself),
        interpret=interpret,
    )
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    with team_kernel.tracing():
        traced = jax.make_jaxpr(call)(*structs)
    outs = team_kernel.bind_team_kernel(traced, operands, info)[: len(out_type)]
    # XLA would run a kernel twice whose result goes into a loop's stack and is used besides: once
    # for the use, and once more to write it into the stack itself (its dynamic-slice fusion).
    outs = lax.optimization_barrier(outs)
    varying = frozenset(axes).union(*map(varying_axes, operands))
    if invariant:
        varying -= frozenset(axes)
    return [make_varying(out, varying) for out in outs]


def block_id() -> jax.Array:
    """The block that runs this code, from 0 to `num_blocks - 1`."""
    blocks = _blocks_of_a_cluster.get()
    return cluster_id() if blocks == 1 else cluster_id() * blocks + block_in_cluster()


def cluster_id() -> jax.Array:
    """The cluster of the block that runs this code, from 0; of one block each, the block."""
    return lax.axis_index(GRID_AXIS)


def block_in_cluster() -> jax.Array:
    """The place of the block that runs this code in its cluster of several, from 0."""
    return lax.axis_index(CLUSTER_AXIS)


@contextlib.contextmanager
def _in_clusters_of(blocks: int) -> Iterator[None]:
    """A kernel that is traced inside has clusters of this many blocks."""
    token = _blocks_of_a_cluster.set(blocks)
    try:
        yield
    finally:
        _blocks_of_a_cluster.reset(token)


_blocks_of_a_cluster = contextvars.ContextVar("blocks_of_a_cluster", default=1)


def _open(meeting: Handshake) -> None:
    """Returns once all peers have started this launch."""
    is_first_thread = lax.axis_index(THREAD_AXIS) == 0
    _when(is_first_thread & (block_id() == 0), meeting.arrive)
    meeting.wait()


def _close(meeting: Handshake, block_done: Any) -> None:
    """Signals every peer that this block is done, and waits in block 0 for all of theirs.

    A kernel ends when its last block does, so one waiting block holds the whole kernel.
    """
    _complete_stores()
    plgpu.barrier_arrive(block_done)
    is_first_thread = lax.axis_index(THREAD_AXIS) == 0

    def tell():
        plgpu.barrier_wait(block_done)
        meeting.arrive_at_end()

    _when(is_first_thread, tell)
    _when(is_first_thread & (block_id() == 0), meeting.wait_at_end)


def _complete_stores() -> None:
    """Waits for this warpgroup's bulk stores, whose shared memory ends with the block."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)


def _compiler_params(given: plgpu.CompilerParams | None, opens_itself: bool) -> Any:
    params = profiling.compiler_params(given)
    return dataclasses.replace(params, skip_device_barrier=True) if opens_itself else params


def _when(condition: jax.Array, fun: Callable[[], None]) -> None:
    lax.cond(condition, lambda: fun(), lambda: None)
