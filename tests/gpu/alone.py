"""Programs that may take their process down with them; run by `test_alone.py`.

    python alone.py dropped OPERATION SEMAPHORE    one device never signals; must not end well
    python alone.py huge                           a result of more than 2^31 elements
    python alone.py threads                        two threads launch on the same devices

Each says "launched" once all is compiled, and "right" at its end.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import slow_peers
from jax import lax
from jax.sharding import PartitionSpec as P

import stretto as st


def dropped(name: str, semaphore: str) -> None:
    mesh = cases.mesh_of(min(4, len(jax.devices())))
    lhs, rhs = (jnp.asarray(x, jnp.bfloat16) for x in cases.operands(512, 512, 1024))
    with slow_peers.dropping(1, semaphore):
        program = jax.jit(cases.mapped(name, mesh, backend="pallas"))
        compiled = program.lower(lhs, rhs).compile()
        shardings = compiled.input_shardings[0]
        operands = [jax.device_put(x, s) for x, s in zip((lhs, rhs), shardings, strict=True)]
        jax.block_until_ready(operands)
        print("launched", flush=True)
        jax.block_until_ready(compiled(*operands))


def huge(part: int = 2**30 + 4096) -> None:
    """The ends of an array whose bytes no int32 counts (B47)."""

    def body() -> jax.Array:
        x = ((lax.iota(jnp.int32, part) + 64 * lax.axis_index("x")) % 127).astype(jnp.int8)
        out = st.all_gather(x, "x", backend="pallas")
        starts = (0, part - 4096, part, 2 * part - 4096)
        return jnp.stack([lax.slice_in_dim(out, s, s + 4096) for s in starts])[None]

    program = jax.shard_map(
        body, mesh=cases.mesh_of(2), in_specs=(), out_specs=P("x"), check_vma=False
    )
    compiled = jax.jit(program).lower().compile()
    print("launched", flush=True)
    places = np.arange(4096) + np.array([[0], [part - 4096], [64], [64 + part - 4096]])
    for got in np.asarray(compiled()):
        np.testing.assert_array_equal(got, places % 127)


def threads(count: int = 100) -> None:
    """Programs with kernels, called at the same time, wait for one another in turn (B13)."""
    program = jax.jit(
        jax.shard_map(
            lambda x: st.all_reduce(x, "x", backend="pallas"),
            mesh=cases.mesh_of(2),
            in_specs=P("x"),
            out_specs=P("x"),
            check_vma=False,
        )
    )
    right: list[bool] = []

    def call(thread: int) -> None:
        for i in range(count):
            x = np.full((2 * 64, 256), 1000 * thread + i, np.float32)
            x[64:] += 1
            right.append(bool((np.asarray(program(x)) == 2 * (1000 * thread + i) + 1).all()))

    call(0)
    print("launched", flush=True)
    both = [threading.Thread(target=call, args=(n,)) for n in (1, 2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert right == [True] * 3 * count, "wrong sums, or a thread that gave up"


if __name__ == "__main__":
    {"dropped": dropped, "huge": huge, "threads": threads}[sys.argv[1]](*sys.argv[2:])
    print("right", flush=True)
