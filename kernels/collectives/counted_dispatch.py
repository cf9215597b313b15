"""Kernel of `expert_dispatch` of many tokens that makes the tables as well, in the same launch.

The tokens of each device are cut into a chunk for each block. A block counts the experts in the chunk
of its own device's tokens, and stores the counts on all devices. While those of the other blocks
arrive, it finds the place of each entry among those of its chunk. The counts of the chunks before
then say which row that is (`chunk_tables`). The order of rows is that of `kernels/xla/routing.py`.

A third warpgroup sends the chunk's tokens to the peers (`counted_sender`). Once the rows are found, the
first two copy them to their rows: the device's own tokens out of `x`, the peers' out of `inbox`.

The kernel ends without a further handshake. What the senders of the peers' blocks tell last says that
they have read this device's choices and written its `inbox`, and `counted` that they have its `counts`.

| object | written or signalled by | waited for by | count | proves |
|---|---|---|---|---|
| `rows` | its device | | | the tokens of its experts |
| `counts[d]` | the blocks of device `d` | | | entries of each expert in each of its chunks |
| `counted` | every block of every device | every block | all | `counts` is complete |
| `seen` | every block | block 0, at its end | all | nobody waits for `counted` any more |
| `entries_arrived[offset]` | the copy engine | both warpgroups | 1 | what a device's chunk chose is there |
| `counts_arrived[slot]` | the copy engine | the block | 1 | counts of some chunks are there |
| `told` | the first warpgroup | the sender | 1 | the own counts are in place everywhere |
| `inbox[p]` | the sender of the same block of peer `p` | | | the tokens of its chunk that have an expert here |
| `sent[p, b]` | the same | the warpgroups of block `b` | groups of tokens | these are in place |
| `loaded[slot]` | the copy engine | the sender | 1 | a token to send is there |
| the sender's stores | | the sender | | its slot may be filled again; the token has arrived |
| `found` | the warpgroups | the warpgroups | all | the first rows are found; then the rows of all entries |
| `arrived[slot]` | the copy engine | its warpgroup | 1 | a token is there |
| stores of the token `stores` before | | its warpgroup | all | its slot may be filled again |
| `handshake` | block 0 | the first warpgroup of each block | 1 | the peers have started |
"""  # noqa: E501

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import kernel, residency
from stretto.distributed.semaphores import SemaphoreArray
from stretto.distributed.team import Team
from stretto.kernels.collectives.chunk_shape import LANES, Shape
from stretto.kernels.collectives.counted_block import Block
from stretto.kernels.collectives.counted_layout import (
    COUNTS_BYTES,
    COUNTS_SLOTS,
    Layout,
)
from stretto.kernels.collectives.counted_sender import Sender
from stretto.kernels.collectives.table_results import TableResults, as_routing
from stretto.kernels.collectives.token_tables import Row
from stretto.kernels.problem.routing import Routing

MOST_VECTORS = 16
"""Of `LANES` entries of a chunk: a thread holds an entry of each, and its place, in registers."""
MOST_EXPERTS = 512
WARPGROUPS = 2
"""Of a block, which share out the tables of the devices' chunks, and then the tokens."""
REGISTERS, REGISTERS_OF_SENDER = 208, 88
"""Of a thread: with fewer the sender spills some at top_k 8."""
SMEM_BYTES = 220_000


def obstacle(
    tokens: int,
    top_k: int,
    devices: int,
    *,
    num_experts: int,
    width: int,
    itemsize: int,
    rows: int,
    num_blocks: int,
) -> str | None:
    """Why a kernel for the tokens of a device cannot make the tables too, None if it can."""
    blocks = min(num_blocks, residency.most_blocks_beside_others())
    shape = Shape.of(devices, tokens, top_k, num_experts, blocks)
    if shape.vectors > MOST_VECTORS:
        return f"a chunk has {MOST_VECTORS * LANES} entries at most, not {shape.entries}."
    if num_experts > MOST_EXPERTS:
        return f"it counts {MOST_EXPERTS} experts at most, not {num_experts}."
    if rows < devices * tokens * top_k:
        return f"rows may be dropped: capacity={rows} is less than {devices * tokens * top_k}."
    row = Row.of(width, itemsize)
    fewest = 2 * (WARPGROUPS + 1)
    if row is None or _slots(shape, row.padded_bytes(itemsize)) < fewest:
        return f"{fewest} rows of {width} do not fit into the shared memory of a block."
    return None


def _slots(shape: Shape, row_bytes: int) -> int:
    """Tokens that fit into shared memory beside the tables."""
    return (SMEM_BYTES - COUNTS_SLOTS * COUNTS_BYTES - shape.smem_bytes) // row_bytes


def dispatch(
    x: jax.Array,
    expert_index: jax.Array,
    team: Team,
    *,
    num_experts: int,
    rows: int,
    num_blocks: int,
    slots: int,
    stores: int,
    interpret: Any = None,
) -> tuple[jax.Array, Routing]:
    """`[tokens, d]`, int32 `[tokens, top_k]` -> rows and tables.

    Rows of no token are not written.
    """
    (tokens, width), top_k = x.shape, expert_index.shape[1]
    row = Row.of(width, x.dtype.itemsize)
    if row is None:
        raise ValueError(f"rows of {width} {x.dtype} cannot be copied.")  # `obstacle` says so.
    blocks = min(num_blocks, residency.most_blocks_beside_others())
    shape = Shape.of(team.size, tokens, top_k, num_experts, blocks)
    most = _slots(shape, row.padded_bytes(x.dtype.itemsize))
    how = Layout.of(team, row, tokens, blocks, shape, WARPGROUPS, most, slots=slots, stores=stores)

    def body(*refs, **scratch):
        refs = dict(zip(names, refs, strict=True))
        warpgroup = lax.axis_index(kernel.THREAD_AXIS)
        to_peers = {name: scratch.pop(name) for name in ("held", "loaded") if name in scratch}
        results = TableResults(
            **{name: refs.pop(name) for name in tables},
            first_expert=team.device_id() * (num_experts // team.size),
        )

        def receive():
            Block(how=how, warpgroup=warpgroup, results=results, **refs, **scratch).run()

        def send():
            shared = {
                name: scratch[name] for name in ("sent", "told", "entries", "entries_arrived")
            }
            Sender(how=how, x=refs["x"], inbox=refs["inbox"], **shared, **to_peers).run()

        if team.is_alone:
            receive()
            return

        @pl.when(warpgroup < WARPGROUPS)
        def _():
            plgpu.set_max_registers(REGISTERS, action="increase")
            receive()

        @pl.when(warpgroup == WARPGROUPS)
        def _():
            plgpu.set_max_registers(REGISTERS_OF_SENDER, action="decrease")
            send()

    tables = TableResults.types(how.entries, num_experts, team.size)
    counts = (team.size, blocks, shape.expert_vectors, LANES)
    symmetric = dict(counts=jax.ShapeDtypeStruct(counts, jnp.int32))
    semaphores = dict(
        counted=SemaphoreArray(restored=True), seen=SemaphoreArray(local=True, restored=True)
    )
    if not team.is_alone:
        inbox = (team.size - 1, tokens, row.parts, row.columns)
        symmetric["inbox"] = jax.ShapeDtypeStruct(inbox, x.dtype)
        semaphores["sent"] = SemaphoreArray((team.size - 1, blocks), restored=True)
    names = "x", "index", "rows", *tables, *symmetric
    out, *found = kernel.launch(
        body,
        x.reshape(tokens, row.parts, row.columns),
        how.flat(expert_index),
        name="expert_dispatch_counted",
        team=team,
        out_type=[jax.ShapeDtypeStruct((rows, row.parts, row.columns), x.dtype), *tables.values()],
        symmetric=list(symmetric.values()),
        semaphore_arrays=semaphores,
        num_blocks=blocks,
        num_threads=WARPGROUPS + (not team.is_alone),
        waiting_warps=1,
        scratch=how.scratch(x.dtype),
        interpret=interpret,
    )
    return out.reshape(rows, width), as_routing(found, expert_index.shape)
