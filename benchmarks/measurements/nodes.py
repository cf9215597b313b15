"""The results of `benchmarks/across_nodes.py`: versions of operations over several nodes."""

from __future__ import annotations

import pathlib

import msgspec

from stretto.benchmarks.errors import BenchmarkError
from stretto.benchmarks.measurements.results import Machine

SCHEMA = "stretto-across-nodes/1"


class Version(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One version's times in microseconds, or why it has none.

    `difference` is its result's relative error against XLA's flat version, `backend` what served a
    call of Stretto's.
    """

    median: float | None = None
    p10: float | None = None
    p90: float | None = None
    difference: float | None = None
    backend: str = ""
    error: str = ""


class Entry(msgspec.Struct, kw_only=True):
    """An operation at one shape, its versions by their labels."""

    op: str
    shape: str
    type: str
    versions: dict[str, Version]


class NodeResults(msgspec.Struct, kw_only=True):
    """The whole file. `network` says in words what joined the nodes, where somebody noted it."""

    schema: str
    machine: Machine
    nodes: int
    devices_per_node: int
    unit: str
    results: list[Entry]
    network: str = ""


def encode(found: NodeResults) -> bytes:
    """The file's text."""
    return msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n"


def read(path: pathlib.Path) -> NodeResults:
    """A file that `across_nodes.py` wrote.

    Raises:
      BenchmarkError: it cannot be read, or is of another kind.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=NodeResults)
    except (OSError, msgspec.DecodeError) as error:
        raise BenchmarkError(f"{path}: {error}; pass what across_nodes.py wrote.") from None
    if found.schema != SCHEMA:
        raise BenchmarkError(f"{path}: schema {found.schema!r} is not {SCHEMA!r}; time it again.")
    return found
