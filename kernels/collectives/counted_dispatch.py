"""Kernel of `expert_dispatch` of many tokens that makes the tables as well, in the same launch.

The tokens of each device are cut into a chunk for each block. A block counts the experts in the chunk
of its own device's tokens, and stores the counts on all devices. The counts of all chunks say
which row each of its entries goes to (`chunk_tables`). Once they are there, the block asks for its
first tokens, which arrive while it sums the counts. The order of rows is that of `kernels/xla/routing.py`.

| object | written or signalled by | waited for by | count | proves |
|---|---|---|---|---|
| `rows` | its device | | | the tokens of its experts |
| `counts[d]` | the blocks of device `d` | | | entries of each expert in each of its chunks |
| `counted` | every block of every device | every warpgroup | all | `counts` is complete |
| `seen` | every block | block 0 | all | `counted` may be zeroed |
| `entries_arrived[offset]` | the copy engine | both warpgroups | 1 | what a device's chunk chose is there |
| `counts_arrived[slot]` | the copy engine | its warpgroup | 1 | counts of some chunks are there |
| `found` | the warpgroups | the warpgroups | all | all counts are summed; then the first rows are found, and the rows of all entries |
| `arrived[slot]` | the copy engine | its warpgroup | 1 | a token is there |
| stores of the token `stores` before | | its warpgroup | all | its slot may be filled again |
| `closing` (`handshake`) | every block of every peer | block 0 | all | this device's tokens and choices have been read |
"""  # noqa: E501

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stretto.distributed import kernel, residency
from stretto.distributed.primitives import warpgroup_tables
from stretto.distributed.semaphores import SemaphoreArray
from stretto.distributed.team import Team
from stretto.kernels.collectives.chunk_shape import COUNTS_BYTES, COUNTS_SLOTS, LANES, Shape
from stretto.kernels.collectives.counted_block import Block
from stretto.kernels.collectives.counted_layout import Layout
from stretto.kernels.collectives.shared_memory import SMEM_BYTES
from stretto.kernels.collectives.table_results import TableResults, as_routing
from stretto.kernels.collectives.token_tables import Row
from stretto.kernels.problem.routing import Routing

MOST_VECTORS = 16
"""Of `LANES` entries of a chunk: a thread holds an entry of each, and its rank, in registers."""
MOST_EXPERTS = 512
WARPGROUPS = 2
"""Of a block, which share out the tables of the devices' chunks, and then the tokens."""


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
    blocks = min(num_blocks, residency.num_multiprocessors())
    shape = Shape.of(devices, tokens, top_k, num_experts, blocks)
    if shape.vectors > MOST_VECTORS:
        return f"a chunk has {MOST_VECTORS * LANES} entries at most, not {shape.entries}."
    if num_experts > MOST_EXPERTS:
        return f"it counts {MOST_EXPERTS} experts at most, not {num_experts}."
    if rows < devices * tokens * top_k:
        return f"rows may be dropped: capacity={rows} is less than {devices * tokens * top_k}."
    row = Row.of(width, itemsize)
    if row is None or _slots(shape, row.padded_bytes(itemsize)) < 2 * WARPGROUPS:
        return f"{2 * WARPGROUPS} rows of {width} do not fit into the shared memory of a block."
    return None


def _slots(shape: Shape, row_bytes: int) -> int:
    """Tokens that fit into shared memory beside the tables."""
    of_warpgroup = COUNTS_SLOTS * COUNTS_BYTES + 4 * warpgroup_tables.WORDS * shape.kinds
    return (SMEM_BYTES - WARPGROUPS * of_warpgroup - shape.smem_bytes) // row_bytes


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
    blocks = min(num_blocks, residency.num_multiprocessors())
    shape = Shape.of(team.size, tokens, top_k, num_experts, blocks)
    most = _slots(shape, row.padded_bytes(x.dtype.itemsize))
    slots = max(2, min(slots, most, team.size * shape.tokens) // WARPGROUPS)
    how = Layout(
        team=team,
        row=row,
        tokens=tokens,
        num_blocks=blocks,
        warpgroups=WARPGROUPS,
        slots=slots,
        stores=min(stores, slots - 1),
        tables=shape,
    )

    def body(
        x, index, rows, positions, group_sizes, tokens_per_expert, out_of_range, counts, **scratch
    ):
        me = team.device_id()  # Read once: in a loop with barriers it would be read each time.
        results = TableResults(
            positions=positions,
            group_sizes=group_sizes,
            tokens_per_expert=tokens_per_expert,
            out_of_range=out_of_range,
            first_expert=me * (num_experts // team.size),
        )
        warpgroup, refs = lax.axis_index(kernel.THREAD_AXIS), dict(x=x, index=index, rows=rows)
        Block(
            how=how, warpgroup=warpgroup, me=me, results=results, counts=counts, **refs, **scratch
        ).run()

    out, *tables = kernel.launch(
        body,
        x.reshape(tokens, row.parts, row.columns),
        how.flat(expert_index),
        name="expert_dispatch_counted",
        team=team,
        out_type=[
            jax.ShapeDtypeStruct((rows, row.parts, row.columns), x.dtype),
            *TableResults.types(how.entries, num_experts, team.size),
        ],
        symmetric=[jax.ShapeDtypeStruct((team.size, blocks * shape.counts), jnp.int16)],
        semaphore_arrays=dict(
            counted=SemaphoreArray(restored=True), seen=SemaphoreArray(local=True, restored=True)
        ),
        num_blocks=blocks,
        num_threads=WARPGROUPS,
        all_wait=True,  # For the counts of all blocks of all devices.
        scratch=how.scratch(x.dtype),
        interpret=interpret,
    )
    return out.reshape(rows, width), as_routing(tables, expert_index.shape)
