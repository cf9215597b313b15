"""Times that were measured beside `stretto bench`: of the transformer's steps, and of attention."""

from __future__ import annotations

import functools
import importlib.resources
import pathlib

import msgspec

from stretto.benchmarks.targets import machine_file
from stretto.benchmarks.targets.machine_file import Target

SCHEMA = "stretto-noted/1"


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where times come from: card, number of them, commit, the page that shows them, and how."""

    card: str
    devices: int
    commit: str
    page: str
    by: str


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a step of `examples/transformer`, in milliseconds.

    Attributes:
      model, sequence, batch, dp, tp: the configuration; sequences over all devices; the mesh.
      part: "forward", "gradients" or "step".
      how: "xla", "fused", or "silent", which sends nothing for the projections.
      ms: the median.
      source: of the file's sources.
    """

    model: str
    sequence: int
    batch: int
    dp: int
    tp: int
    part: str
    how: str
    ms: float
    source: str

    @property
    def case(self) -> str:
        """The key of samples that are left out together: a configuration on a mesh."""
        return f"{self.model}, {self.sequence} tokens, tp={self.tp}"


class AttentionTime(msgspec.Struct, frozen=True, kw_only=True):
    """Causal attention of one sequence, in microseconds; "forward", or "both" with gradients."""

    sequence: int
    heads: int
    kv_heads: int
    head_dim: int
    part: str
    us: float
    source: str


class GroupedTime(msgspec.Struct, frozen=True, kw_only=True):
    """`grouped_matmul` with equal groups, in microseconds."""

    m: int
    k: int
    n: int
    groups: int
    us: float
    source: str


class RowsTime(msgspec.Struct, frozen=True, kw_only=True):
    """Rows copied in another order, in microseconds; `bytes` are read and written together."""

    bytes: int
    us: float
    source: str


class Noted(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file."""

    schema: str
    about: str
    sources: dict[str, Source]
    steps: list[StepTime]
    attention: list[AttentionTime]
    grouped: list[GroupedTime]
    rows: list[RowsTime]


def target_of(source: str) -> Target:
    """The machine that a source's times were taken on.

    Raises:
      LookupError: no machine file has its card.
    """
    card = times().sources[source].card
    target = machine_file.of_card(card)
    if target is None:
        raise LookupError(f"no machine file has the card {card!r}")
    return target


@functools.cache
def times() -> Noted:
    """The noted times that Stretto ships."""
    folder = pathlib.Path(str(importlib.resources.files("stretto.benchmarks")))
    return msgspec.json.decode((folder / "results/noted/times.json").read_bytes(), type=Noted)
