"""Parts of a fused matmul, put together to one kernel.

A block has the warpgroups of its main loop's roles, one more for a transfer that calculates, and
after them as many as it takes for warps that do one thing each: the main loop's own (loading, storing), the transfer, and one that polls for
operands to arrive (`gates`). What takes long or waits for other blocks and devices is theirs: while a warp that
multiplies waits for a semaphore, the tensor cores idle.

What stands between devices is the same for all kernels that pull:

| object | written or signalled by | waited for by | count | proves |
|---|---|---|---|---|
| `opening` | every device's block 0 (`handshake`) | transfer; polling and signalling warps | 1 | that device has started |
| `released` | the peers' transfer warps, once each | block 0's transfer warp | blocks x peers | no peer reads this device's memory any more |
| `awaited` | the polling warps, once each | block 0's transfer warp | blocks | no block waits for operands any more |

Block 0's transfer warp leaves `released` and `awaited` at zero. After `awaited` it may zero what the polling
warps have waited for (`Transfer.finish`), since several wait for each and none of them can subtract.
"""  # noqa: E501

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import kernel, residency, schedule
from stretto.distributed.handshake import Handshake
from stretto.distributed.semaphores import Semaphore, SemaphoreArray
from stretto.distributed.team import Team
from stretto.kernels.engine import announced, assignment, gates, joining, registers
from stretto.kernels.engine.block import Block
from stretto.kernels.engine.gates import Gates
from stretto.kernels.engine.joining import Joining
from stretto.kernels.engine.mainloop import Mainloop, Role
from stretto.kernels.engine.parts import Parts, Ref, Transfer
from stretto.kernels.engine.remainder import Remainder, Sharing, remainder_of
from stretto.kernels.engine.transfers import Scratch


class Refs(types.SimpleNamespace):
    """What a kernel's parts are made of, by the names given to `fuse`.

    Operands, outs and symmetric buffers, in the structures they were given in; semaphores; the
    transfer's memory (`Scratch`), of `Buffers` `pulled` and `pulled_full`, or what these are named;
    and `num_blocks` and `num_clusters`, of the grid: blocks move data, clusters make tiles.
    """


def fuse(
    parts: Callable[[Refs], Parts],
    *,
    name: str,
    team: Team | None,
    mainloop: Mainloop,
    num_tiles: int,
    sharing: Sharing | None = None,
    operands: Mapping[str, Any],
    outs: Mapping[str, Any],
    symmetric: Mapping[str, Any] | None = None,
    semaphores: Mapping[str, SemaphoreArray] | None = None,
    buffers: Scratch | Sequence[Scratch] = (),
    transfer_registers: int | None = None,
    waits: bool = False,
    signals: bool = False,
    held_up: Callable[[int, int], int | None] | None = None,
    invariant: bool = False,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Any = None,
) -> dict[str, Any]:
    """Runs the kernel that `parts` make on every device of `team`.

    Args:
      parts: called once, first in the kernel.
      name: of the kernel, in reports and profiles.
      team: the devices; None for a kernel on one.
      mainloop: what loads, multiplies and stores.
      num_tiles: at most so many there are (`Order.count`); the grid is made for them.
      sharing: how blocks may share the tiles of the last wave, where `Parts.k_tiles` is a number
        and there are just `num_tiles`.
      operands: this device's arrays, by name; each value is an array or a sequence of them.
      outs: shapes and types of the results, by name, likewise.
      symmetric: those of buffers that are not returned, likewise.
      semaphores: by name; all zero at the start. `released` and `awaited` are this function's own.
      buffers: of the transfer, one or several of different names.
      transfer_registers: of each thread of a warpgroup that runs the transfer, for one that
        calculates; by default a single warp does. Those that multiply have fewer then.
      waits: an operand has an `Arrival`.
      signals: the sink has a `stored`, which signals to peers.
      held_up: (clusters of the grid, tiles that are shared) -> how many clusters of this device
        each cluster of a peer holds up that does not start (`residency.most_blocks_end`); None
        where all may be. Without it, XLA's barrier starts a kernel that fills the device.
      invariant: all devices compute bitwise the same results (`kernel.launch`).
      compiler_params: passed on to Pallas.
      interpret: `simulator.SimulatorParams()` to run in the simulator.

    Returns:
      The results by name, in the structure of `outs`.

    Raises:
      ValueError: the parts or the main loop's roles are not those that were announced.
    """
    cluster = mainloop.config.blocks
    num_blocks = residency.num_blocks_for(num_tiles, cluster)
    num_clusters = num_blocks // cluster
    remainder = _remainder(mainloop, num_tiles, num_clusters, sharing)
    made_of = {**outs, **_shared_memory(remainder, mainloop)}
    memory = dict(**operands, **made_of, **(symmetric or {}))
    arrays = dict(semaphores or {})
    if team is not None:
        arrays["released"] = SemaphoreArray(restored=True)
    if team is not None and waits:
        arrays["awaited"] = SemaphoreArray(local=True, restored=True)
    if remainder is not None:
        arrays["given_sums"] = joining.semaphores(remainder)
    each = buffers if isinstance(buffers, Sequence) else [buffers]
    transfer_scratch = {key: x for one in each for key, x in one.scratch().items()}
    calculates = transfer_registers is not None
    warps = mainloop.warps + (team is not None and not calculates) + waits
    of_warps = schedule.ceil_div(warps, assignment.WARPS_OF_A_WARPGROUP)
    num_warpgroups = mainloop.warpgroups + calculates + of_warps

    def body(*refs: Any, handshake: Handshake | None = None, **rest: Any) -> None:
        named = _named(memory, refs)
        shared = {key: rest[key] for key in (*arrays, *transfer_scratch)}
        made = parts(Refs(num_blocks=num_blocks, num_clusters=num_clusters, **named, **shared))
        announced.check_parts(name, made, team, mainloop, waits=waits, signals=signals)
        wait = _nothing if handshake is None else handshake.wait
        block = Block.of(
            made,
            num_clusters,
            before_stores=wait if signals else _nothing,
            joining=_joining(remainder, named, rest),
        )
        polled = _gates(block, mainloop, rest) if waits else None
        roles = [*mainloop.roles(block, polled, rest)]
        announced.check_roles(name, mainloop, roles)
        if handshake is not None and made.transfer is not None:
            moving = _moving(made.transfer, handshake, rest["released"], rest.get("awaited"))
            if transfer_registers is not None:
                roles = assignment.with_fewer_registers(roles, transfer_registers, of_warps)
            roles.append(Role(moving, int(calculates), transfer_registers))
        if polled is not None:
            # Peers have started, or the time that takes would count against the limit of waits.
            roles.append(Role(_polling(polled, wait, rest.get("awaited"))))
        registers.check(name, roles, num_warpgroups)
        assignment.assign(roles, num_warpgroups)

    held = 0 if held_up is None else held_up(num_clusters, remainder.tiles if remainder else 0)
    most_end = held is not None and residency.most_blocks_end(num_blocks, held)
    results = kernel.launch(
        body,
        *jax.tree.leaves([*operands.values()]),
        name=name,
        team=team,
        out_type=jax.tree.leaves([*made_of.values()]),
        symmetric=jax.tree.leaves([*(symmetric or {}).values()]),
        num_blocks=num_blocks,
        num_threads=num_warpgroups,
        cluster=cluster,
        semaphore_arrays=arrays,
        scratch={
            **transfer_scratch,
            **mainloop.scratch(),
            **(gates.scratch() if waits else {}),
            **({} if remainder is None else joining.scratch(mainloop.warpgroups)),
        },
        # `released` and the transfer's `finish` close the kernel.
        waiting_warps=0 if team is None else 1 + waits + signals,
        all_wait=not most_end,
        fills=held_up is not None and most_end,
        invariant=invariant,
        compiler_params=compiler_params,
        interpret=interpret,
    )
    found = _named(made_of, results)
    return {key: found[key] for key in outs}


def _remainder(
    mainloop: Mainloop, num_tiles: int, num_clusters: int, sharing: Sharing | None
) -> Remainder | None:
    """How blocks share tiles; None where they do not.

    They do not where an epilogue takes a matrix, whose pieces are loaded between stages.
    """
    beside = mainloop.product.beside
    if sharing is None or (beside is not None and beside.has_matrix):
        return None
    return remainder_of(num_tiles, num_clusters, sharing)


def _shared_memory(remainder: Remainder | None, mainloop: Mainloop) -> dict[str, Any]:
    """The memory through which blocks give sums of tiles, where they share any."""
    if remainder is None:
        return {}
    return dict(shared_sums=joining.memory(remainder, mainloop.config))


def _joining(
    remainder: Remainder | None, named: Mapping[str, Any], rest: Mapping[str, Any]
) -> Joining | None:
    """What joins the sums of tiles that blocks share."""
    if remainder is None:
        return None
    return Joining(
        remainder=remainder,
        sums=named["shared_sums"],
        given_sums=rest["given_sums"],
        given=rest["given"],
        joined=rest["joined"],
    )


def _named(memory: Mapping[str, Any], leaves: Sequence[Any]) -> dict[str, Any]:
    """Refs or arrays, by the names and in the structures of `memory`."""
    structure = jax.tree.structure([*memory.values()])
    return dict(zip(memory, jax.tree.unflatten(structure, leaves), strict=True))


def _gates(block: Block, mainloop: Mainloop, scratch: Mapping[str, Ref]) -> Gates:
    """The gates of a kernel whose operands have yet to arrive."""
    arrival = gates.arrival_of([block.parts.lhs, block.parts.rhs])
    opened, passed = scratch["opened"], scratch["passed"]
    return Gates(block, arrival, mainloop.config.tile_k, opened=opened, passed=passed)


def _polling(
    polled: Gates, before: Callable[[], None], awaited: Semaphore | None
) -> Callable[[], None]:
    """The polling warp."""

    def run() -> None:
        polled.poll(before)
        if awaited is not None:
            # Publishes that this block has seen all its operands arrive.
            awaited.signal()

    return run


def _moving(
    transfer: Transfer, handshake: Handshake, released: Semaphore, awaited: Semaphore | None
) -> Callable[[], None]:
    """The transfer's warp, which also starts the kernel together with the peers, and ends it."""
    team, num_blocks = handshake.team, handshake.num_blocks

    def run() -> None:
        with jax.named_scope("communicate"):
            handshake.arrive_and_wait()
            transfer.run()
            # Publishes to the peers that this block reads no memory of theirs any more.
            for offset in team.peer_offsets:
                released.signal(peer_id=team.neighbour(offset))

            @pl.when(kernel.block_id() == 0)
            def _():
                handshake.forget_start()
                # No block of a peer reads this device's memory any more.
                released.wait(num_blocks * (team.size - 1), decrement=True)
                if awaited is not None:
                    # No block waits for operands any more.
                    awaited.wait(num_blocks, decrement=True)
                if transfer.finish is not None:
                    transfer.finish()

    return run


def _nothing() -> None:
    """Where there is nobody to wait for."""
