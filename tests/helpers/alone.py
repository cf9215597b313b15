"""Programs that may take their process down with them; run by `test_alone.py`.

    python alone.py dropped OPERATION SEMAPHORE    one device never signals; must not end well
    python alone.py huge                           a result of more than 2^31 elements
    python alone.py threads                        two threads launch on the same devices
    python alone.py unfinished                     ends while its work is running

Each says "ready" once all is compiled, goes on when it reads a line, and says "right" at its end.
"""

from __future__ import annotations

import sys
import threading

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import slow_peers
import subjects
from jax import lax
from jax.sharding import PartitionSpec as P
from subjects import SUBJECTS

import stretto as st


def wait_for_the_word() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


def dropped(name: str, semaphore: str) -> None:
    mesh = cases.mesh_of(min(4, len(jax.devices())))
    subject = SUBJECTS[name]
    shapes = subject.shapes(mesh.size, subject.sizes_of(mesh.size, 256, 512, 256))

    def body(seed):
        operands = subject.draw(subjects.own_key(seed, mesh), shapes, whole=True)
        return jnp.sum(subject.call(operands, "x", backend="pallas").astype(jnp.float32))[None]

    # Nothing of XLA's crosses devices after the kernel: it would wait for those that gave up.
    function = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P("x"), check_vma=False)
    with slow_peers.dropping(1, semaphore):
        program = jax.jit(function).lower(np.int32(0)).compile()
    wait_for_the_word()
    print(np.asarray(program(np.int32(0))))


def huge(part: int = 2**30 + 4096) -> None:
    """The ends of an array whose bytes no int32 counts (B47)."""

    def body(start: jax.Array) -> jax.Array:
        x = ((lax.iota(jnp.int32, part) + start + 64 * lax.axis_index("x")) % 127).astype(jnp.int8)
        out = st.all_gather(x, "x", backend="pallas")
        starts = (0, part - 4096, part, 2 * part - 4096)
        return jnp.stack([lax.slice_in_dim(out, s, s + 4096) for s in starts])

    compiled = jax.jit(subjects.on_mesh(body, cases.mesh_of(2))).lower(np.int32(0)).compile()
    wait_for_the_word()
    places = np.arange(4096) + np.array([[0], [part - 4096], [64], [64 + part - 4096]])
    for got in np.asarray(compiled(np.int32(0))):
        np.testing.assert_array_equal(got, places % 127)


def _sum_on_two():
    return jax.jit(
        jax.shard_map(
            lambda x: st.all_reduce(x, "x", backend="pallas"),
            mesh=cases.mesh_of(2),
            in_specs=P("x"),
            out_specs=P("x"),
            check_vma=False,
        )
    )


def threads(count: int = 100) -> None:
    """Programs with kernels, called at the same time, wait for one another in turn (B13)."""
    program = _sum_on_two()
    right: list[bool] = []

    def call(thread: int) -> None:
        for i in range(count):
            x = np.full((2 * 64, 256), 1000 * thread + i, np.float32)
            x[64:] += 1
            right.append(bool((np.asarray(program(x)) == 2 * (1000 * thread + i) + 1).all()))

    call(0)
    wait_for_the_word()
    both = [threading.Thread(target=call, args=(n,)) for n in (1, 2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    if right != [True] * 3 * count:
        raise SystemExit("wrong sums, or a thread that gave up")


def unfinished(count: int = 200) -> None:
    """Results that nobody waits for, nor uses, keep no process from ending (B36)."""
    program = _sum_on_two()
    x = program(np.ones((2 * 64, 256), np.float32))
    wait_for_the_word()
    for _ in range(count):
        x = program(x)


if __name__ == "__main__":
    programs = {"dropped": dropped, "huge": huge, "threads": threads, "unfinished": unfinished}
    programs[sys.argv[1]](*sys.argv[2:])
    print("right", flush=True)
