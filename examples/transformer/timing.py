"""Device time of compiled steps: several are queued, and the moments they complete are noted."""

from __future__ import annotations

import itertools
import time
from typing import Any

import jax


class Program:
    """A compiled part of a step with all that it takes.

    Args:
      compiled: maps (state, *rows) to the next state and a loss, or to the loss first and,
        where it has them, gradients.
      state: weights, or a whole training state that each run consumes and replaces.
      rows: the bytes, which are also what is to be predicted.
      replaces_state: which of the two.
    """

    def __init__(self, compiled: Any, state: Any, rows: jax.Array, replaces_state: bool):
        self.compiled = compiled
        self._state = state
        self._rows = rows, rows
        self._replaces_state = replaces_state

    def run(self) -> jax.Array:
        """Queues one run; returns its loss, a number that is there when the run has completed."""
        if self._replaces_state:
            self._state, loss = self.compiled(self._state, *self._rows)
            return loss
        out = self.compiled(self._state, *self._rows)
        return out[0] if isinstance(out, tuple) else out

    def needed_bytes(self) -> int:
        """Memory on one device: operands, results and what lies between."""
        stats = self.compiled.memory_analysis()
        return (
            stats.argument_size_in_bytes
            + stats.output_size_in_bytes
            + stats.temp_size_in_bytes
            - stats.alias_size_in_bytes
        )


def visit(program: Program, samples: int, queued: bool) -> list[float]:
    """`samples` times of one run, in milliseconds.

    The first run's time is dropped: it holds the dispatch and the change from another program.
    On a CPU runs are not queued, for programs in flight together may wait for each other.
    """
    losses, marks = [], []
    for _ in range(samples + 1):
        losses.append(program.run())
        if not queued:
            marks.append(_completion(losses[-1]))
    if queued:
        marks = [_completion(loss) for loss in losses]
    return [(after - before) * 1e3 for before, after in itertools.pairwise(marks)]


def _completion(loss: jax.Array) -> float:
    loss.block_until_ready()
    return time.perf_counter()
