"""The tests of tests/gpu in a job of several processes: each has one device, and runs every test.

    stretto run -n 2 --devices-per-gpu 2 --tee 0 -m pytest tests/gpu

All processes make the same calls in the same order, as JAX asks of them. What a test reads on the
host is gathered from all processes, so that tests are written as for one. Private JAX, checked on
0.11.2: no public hook says how an array is read.
"""

from __future__ import annotations

import os

from stretto.launch import environment

COUNT = int(os.environ.get(environment.NUM_PROCESSES, "1"))
"""How many processes run these tests together; 1 outside a job."""


def join() -> None:
    """Makes this process one of its job; before JAX's devices are known."""
    import stretto.launch

    stretto.launch.initialize()
    _read_whole_results()


def _read_whole_results() -> None:
    """Reading an array that lies on several processes gathers it, on all of them at once."""
    from jax._src.array import ArrayImpl
    from jax.experimental import multihost_utils

    read = ArrayImpl._value.fget

    def value(self):
        if self.is_fully_addressable or self.is_fully_replicated:
            return read(self)
        return multihost_utils.process_allgather(self, tiled=True)

    ArrayImpl._value = property(value)
