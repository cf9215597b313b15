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
import typing
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

if TYPE_CHECKING:
    from stretto.kernels.choice.dispatch import Problem

SCHEMA = 1

NEAR = 1.0
"""How far, in doublings summed over the three sizes, an entry speaks for a shape."""

MARGIN = 0.03
"""An entry of another shape is trusted only where one side won by this share."""


class TableError(ValueError):
    """A table that cannot be read, with what is wrong with it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """What was measured at one shape: sizes as in `Problem`, times in microseconds.

    `config` holds the fields of the kernel's `Config` that was fastest.
    """

    op: str
    m: int
    k: int
    n: int
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
    def key(self) -> tuple[str, str, int, int, int, int]:
        """What an entry is found by; a table has one per key."""
        return (self.op, self.dtype, self.devices, self.m, self.k, self.n)

    def distance(self, problem: Problem) -> float:
        """Doublings between the shapes, summed over m, k, n; infinite for another problem.

        Of a collective, which has no k, only the size counts.
        """
        if (self.op, self.dtype, self.devices) != (problem.op, problem.dtype, problem.devices):
            return math.inf
        if not (self.k or problem.k):
            return abs(math.log2(max(self.m * self.n, 1) / max(problem.m * problem.n, 1)))
        pairs = ((self.m, problem.m), (self.k, problem.k), (self.n, problem.n))
        return sum(abs(math.log2(max(a, 1) / max(b, 1))) for a, b in pairs)


@dataclasses.dataclass(frozen=True)
class Table:
    """The entries for one type of GPU."""

    device_kind: str
    entries: tuple[Entry, ...] = ()

    def nearest(self, problem: Problem) -> tuple[Entry, float] | None:
        """The entry closest to `problem` and its distance; None without one that is `NEAR`."""
        ranked = [(entry.distance(problem), entry) for entry in self.entries]
        distance, entry = min(ranked, key=lambda pair: pair[0], default=(math.inf, None))
        return None if entry is None or distance > NEAR else (entry, distance)


def file_name(device_kind: str) -> str:
    """The file of a type of GPU: "NVIDIA H100 80GB HBM3" has `nvidia-h100-80gb-hbm3.toml`."""
    return re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-") + ".toml"


def folder() -> pathlib.Path:
    """Where the tables lie."""
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
    entry = Entry(**item)
    for name in ("m", "k", "n", "devices"):
        if not isinstance(getattr(entry, name), int):
            raise TypeError(f"{name}={getattr(entry, name)!r} is not an integer")
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
        warnings.warn(
            f"no tuned table for {device_kind}, choosing by analysis ({error}); `stretto tune`"
            " writes one.",
            stacklevel=2,
        )
        return Table(device_kind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What a table says of a problem: the fields of a `dispatch.Choice` but for the problem.

    `backend` is "pallas" or "xla"; the times are those of the very shape, in microseconds, None
    where the entry is another shape's.
    """

    backend: str
    reason: str
    config: Any
    fused_us: float | None = None
    xla_us: float | None = None


def look_up(problem: Problem, config_type: type, itemsize: int) -> Found | None:
    """What the table of the problem's GPU says of it, None where it says nothing.

    That is where no entry is `NEAR`, where the result's elements are of another width than the
    operands', where the nearest entry's configuration does not fit the kernel any more, and where
    it is another shape's and neither side won by `MARGIN`.

    Args:
      problem: the call.
      config_type: the kernel's `Config`.
      itemsize: bytes of an operand's element, for `Config.check`.
    """
    nearest = table_for(problem.device_kind).nearest(problem)
    if nearest is None or jnp.dtype(problem.out_dtype).itemsize != itemsize:
        return None
    entry, distance = nearest
    try:
        config = config_from_data(config_type, entry.config)
        config.check(itemsize)
    except (TypeError, ValueError):
        return None
    backend = "pallas" if entry.ratio <= 1 else "xla"
    share = f"{100 * entry.ratio:.0f}% of XLA's time"
    if distance == 0:
        return Found(
            backend=backend,
            reason=f"the fused kernel was measured to take {share}",
            config=config,
            fused_us=entry.fused_us,
            xla_us=entry.xla_us,
        )
    if abs(entry.ratio - 1) < MARGIN:
        return None
    shape = f"{entry.m}x{entry.k}x{entry.n}" if entry.k else f"{entry.m}x{entry.n}"
    reason = f"at the nearest shape in the table, {shape}, the fused kernel takes {share}"
    return Found(backend=backend, reason=reason, config=config)


def config_to_data(config: Any) -> dict[str, Any]:
    """The fields of a `Config`, nested ones as dictionaries, as a table holds them."""
    return dataclasses.asdict(config)


def config_from_data(config_type: type, data: Mapping[str, Any]) -> Any:
    """The `Config` with these fields, the others at their defaults.

    Raises:
      TypeError: `data` has a field that `config_type` lacks.
    """
    hints = typing.get_type_hints(config_type)
    arguments = {}
    for name, value in data.items():
        kind = hints.get(name)
        nested = isinstance(value, Mapping) and isinstance(kind, type)
        arguments[name] = config_from_data(kind, value) if nested and kind else value
    return config_type(**arguments)
