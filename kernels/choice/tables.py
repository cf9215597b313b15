"""Tuned tables: which configuration of a kernel was fastest at which shape, and XLA's time there.

A table is a TOML file of `configs/tuned/`, one per type of GPU, written by `stretto tune`. It is
read once per process. A missing or damaged one gives a warning, and calls are then decided by
analysis.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import math
import pathlib
import re
import tomllib
import warnings
from collections.abc import Mapping
from typing import Any

from stretto.kernels.problem.machine import is_rated
from stretto.kernels.problem.problem import Problem

SCHEMA = 1

NEAR = 1.0
"""Distance, in doublings summed over the sizes, up to which an entry's configuration is used."""

REACH = 3.0
"""Distance up to which an entry corrects the estimate of a shape. With entries left out, shapes
whose nearest entries are 2 to 3 doublings away were still predicted better than by the estimate."""

KINDS = ("masking", "dim")
"""Sizes, of attention, of which each number is a kind: what was measured of one says nothing of
another. They are its mask and the size of its heads."""

ROOM = ("rows",)
"""Sizes, of a combine, on which no time depends: rows that there is room for, of which those of the
tokens' choices are used. A table has as many as there are choices, a call mostly more."""


class TableError(ValueError):
    """A table that cannot be read, with what is wrong with it."""


# The fields of an entry in a file, besides the sizes of its problem.
FIELDS = ("op", "dtype", "devices", "fused_us", "xla_us", "config", "versions")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """What was measured at one shape: sizes as in `Problem`, times in microseconds.

    `config` holds the fields of the kernel's `Config` that was fastest. In a file the sizes stand
    beside the other fields, by name; one that is 0 (`k` of a collective) counts as not there.
    """

    op: str
    sizes: Mapping[str, int]
    dtype: str
    devices: int
    fused_us: float
    xla_us: float
    config: Mapping[str, Any]
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """The fused kernel's time over XLA's."""
        return self.fused_us / self.xla_us

    @property
    def key(self) -> tuple[Any, ...]:
        """What an entry is found by; a table has one per key."""
        return (self.op, self.dtype, self.devices, *self.sizes.items())

    @property
    def shape(self) -> str:
        """The sizes, as in "8192x8192x28672"."""
        return "x".join(map(str, self.sizes.values()))

    def distance(self, problem: Problem) -> float:
        """Doublings between the shapes, summed over the sizes; infinite for another problem.

        Of a collective, whose sizes are rows and columns, only the product counts.
        """
        asked = (problem.operation, problem.types.lhs, problem.devices)
        if (self.op, self.dtype, self.devices) != asked:
            return math.inf
        if self.sizes.keys() != problem.sizes.keys():
            return math.inf
        if any(self.sizes[name] != problem.sizes[name] for name in KINDS if name in self.sizes):
            return math.inf
        if self.sizes.keys() == {"m", "n"}:
            return _doublings(math.prod(self.sizes.values()), math.prod(problem.sizes.values()))
        works = [(size, problem.sizes[x]) for x, size in self.sizes.items() if x not in ROOM]
        return sum(_doublings(size, asked) for size, asked in works)


def _doublings(a: int, b: int) -> float:
    return abs(math.log2(max(a, 1) / max(b, 1)))


@dataclasses.dataclass(frozen=True)
class Table:
    """The entries for one type of GPU."""

    device_kind: str
    entries: tuple[Entry, ...] = ()

    def near(self, problem: Problem) -> list[tuple[float, Entry]]:
        """The entries within `REACH` of `problem` with their distances, nearest first."""
        ranked = [(entry.distance(problem), entry) for entry in self.entries]
        return sorted((p for p in ranked if p[0] <= REACH), key=lambda pair: pair[0])

    def nearest(self, problem: Problem) -> tuple[Entry, float] | None:
        """The entry closest to `problem` and its distance; None without one that is `NEAR`."""
        distance, entry = next(iter(self.near(problem)), (math.inf, None))
        return None if entry is None or distance > NEAR else (entry, distance)


def file_name(device_kind: str) -> str:
    """The file of a type of GPU: "NVIDIA H100 80GB HBM3" has `nvidia-h100-80gb-hbm3.toml`."""
    return re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-") + ".toml"


def folder() -> pathlib.Path:
    """The folder of the tables."""
    return pathlib.Path(str(importlib.resources.files("stretto.configs"))) / "tuned"


def read(path: pathlib.Path) -> Table:
    """The table in `path`.

    Raises:
      TableError: there is none, or it is damaged or of another schema.
    """
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise TableError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TableError(f"{path}: damaged, not TOML: {error}") from None
    if data.get("schema") != SCHEMA:
        raise TableError(f"{path}: schema {data.get('schema')!r}, this version reads {SCHEMA}")
    try:
        entries = tuple(_entry(item) for item in data.get("entry", []))
        return Table(device_kind=str(data["device_kind"]), entries=entries)
    except (KeyError, TypeError, ValueError) as error:
        raise TableError(f"{path}: damaged: {type(error).__name__}: {error}") from None


def _entry(item: Mapping[str, Any]) -> Entry:
    others = {name: x for name, x in item.items() if name not in FIELDS}
    unknown = [name for name, x in others.items() if len(name) > 1 and not isinstance(x, int)]
    if unknown:
        raise TypeError(f"unknown field {unknown[0]!r}; a size is a whole number")
    sizes = {name: size for name, size in item.items() if name not in FIELDS and size != 0}
    entry = Entry(sizes=sizes, **{name: item[name] for name in FIELDS if name in item})
    for name, value in {**sizes, "devices": entry.devices}.items():
        if not isinstance(value, int):
            raise TypeError(f"{name}={value!r} is not an integer")
    if not (entry.fused_us > 0 and entry.xla_us > 0):
        raise ValueError(f"fused_us={entry.fused_us} and xla_us={entry.xla_us} must be positive")
    if not isinstance(entry.config, Mapping):
        raise TypeError(f"config={entry.config!r} is not a table")
    return entry


def exists(device_kind: str) -> bool:
    """Whether there is a table of a type of GPU."""
    return (folder() / file_name(device_kind)).exists()


@functools.cache
def table_for(device_kind: str) -> Table:
    """The table of a type of GPU, read once; an empty one, with a warning, if it cannot be read."""
    try:
        return read(folder() / file_name(device_kind))
    except TableError as error:
        reason = f" ({error})" if exists(device_kind) else ""
        decides = "estimates that were fitted to H200s decide"
        if not is_rated(device_kind):
            decides = "XLA serves its calls"
        warnings.warn(
            f"no tuned table for {device_kind}{reason}: {decides}; `stretto tune` writes one.",
            stacklevel=2,
        )
        return Table(device_kind)
