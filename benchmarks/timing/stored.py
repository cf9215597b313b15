"""Compiled programs in files, for another process on the same machine.

A program of Stretto's holds two addresses of its process: of the heap and of the page of reports.
All processes have both at the same places, if these were free (`memory/heap_memory.py`,
`memory/mailbox.py`), so a program of one runs in another; `addresses` is compared first.
"""

from __future__ import annotations

import dataclasses
import pathlib
import pickle
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from stretto.benchmarks import files
from stretto.distributed.memory import heap, mailbox


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """A candidate's program that was compiled, or why there is none.

    Attributes:
      program: its file.
      backend, config, out: as `lowering.Program` has them.
      error: why it was not compiled, "" if it was.
    """

    program: pathlib.Path = pathlib.Path()
    backend: str = ""
    config: str = ""
    out: Any = None
    error: str = ""


def addresses() -> tuple[int, int]:
    """Those of this process that its kernels have in them; what is there is made by the call."""
    return heap.address() if heap.is_wanted() else 0, mailbox.address()


def save(compiled: jax.stages.Compiled, path: pathlib.Path) -> None:
    """Writes a program, with the shapes of its operands and results, into a file."""
    files.write_whole(path, pickle.dumps(serialize_executable.serialize(compiled)))


def load(path: pathlib.Path, mesh: Mesh) -> jax.stages.Compiled:
    """The program of a file that `save` wrote on this machine, for the devices of `mesh`.

    The process that wrote it must have had the same `addresses`.
    """
    program, in_tree, out_tree = pickle.loads(path.read_bytes())
    return serialize_executable.deserialize_and_load(
        program, in_tree, out_tree, execution_devices=list(mesh.devices.flat)
    )
