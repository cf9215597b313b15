"""How much of a block's shared memory the buffers of a collective take."""

SMEM_BYTES = 220_000
"""Of `problem.machine.SHARED_BYTES`; barriers, and what Pallas takes besides, have the rest."""
