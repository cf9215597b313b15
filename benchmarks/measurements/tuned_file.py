"""Writing tuned tables, so that `stretto.kernels.choice.tables` reads back what was measured."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from stretto.benchmarks import files
from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.cases.shapes import operation_named
from stretto.benchmarks.measurements.results import Results
from stretto.kernels.choice.tables import SCHEMA, Entry, Table
from stretto.kernels.problem.machine import Machine

_HEAD = """\
# Written by `stretto tune`; do not edit. Times in microseconds, one call, the slowest device.
"""
_RECORDED = ("stretto", "jax", "nvidia-nccl-cu13", "nvidia-nccl-cu12")


def merged(table: Table, entry: Entry) -> Table:
    """`table` with `entry` in place of the one with the same key, in the order of keys."""
    entries = {old.key: old for old in table.entries}
    entries[entry.key] = entry
    return Table(table.device_kind, tuple(entries[key] for key in sorted(entries)))


def entries_of(found: Results) -> list[Entry]:
    """Entries of a tuned table from results of `stretto bench`, one per case.

    Each with the configuration that the kernel was run in. Cases without both times are left out,
    and those whose operands were drawn in an unusual way, which a call does not know of.
    """
    entries = []
    for measurement in found.measurements:
        fused, xla = measurement.of("fused"), measurement.of("xla")
        if (
            measurement.values
            or fused is None
            or xla is None
            or fused.backend != "pallas"
            or not fused.config
        ):
            continue
        case = Case(
            operation=operation_named(measurement.kernel),
            sizes=measurement.sizes,
            dtype=measurement.type,
            devices=measurement.devices,
        )
        config = json.loads(fused.config)
        entries.append(entry_of(case, config, fused.time, xla.time, found.machine.versions))
    return entries


def entry_of(
    case: Case,
    config: Mapping[str, Any],
    fused_us: float,
    xla_us: float,
    versions: Mapping[str, str],
) -> Entry:
    """A table's entry for `case`; of the versions those that a time depends on most."""
    problem = case.problem(Machine(platform="gpu", kind="any"))
    return Entry(
        op=problem.operation,
        sizes=problem.sizes,
        dtype=problem.types.lhs,
        devices=problem.devices,
        fused_us=round(fused_us, 2),
        xla_us=round(xla_us, 2),
        config=config,
        versions={name: versions[name] for name in _RECORDED if name in versions},
    )


def write(table: Table, path: pathlib.Path) -> None:
    """Writes `table` to `path`, whole or not at all; BenchmarkError if that cannot be."""
    files.write_whole(path, to_toml(table).encode())


def to_toml(table: Table) -> str:
    """`table` as TOML text."""
    parts = [_HEAD + f"schema = {SCHEMA}\ndevice_kind = {_value(table.device_kind)}\n"]
    for entry in table.entries:
        lines = ["[[entry]]"]
        lines += [f"{name} = {_value(value)}" for name, value in _fields(entry).items()]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _fields(entry: Entry) -> dict[str, Any]:
    """An entry's fields as a file has them; `k` stands there even where it is no size."""
    sizes = {name: entry.sizes.get(name, 0) for name in "mkn"} | dict(entry.sizes)
    return {
        "op": entry.op,
        **sizes,
        "dtype": entry.dtype,
        "devices": entry.devices,
        "fused_us": entry.fused_us,
        "xla_us": entry.xla_us,
        "config": entry.config,
        "versions": entry.versions,
    }


def _value(value: Any) -> str:
    """A TOML value: JSON's notation, but for tables and for numbers that it would not take."""
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(name)} = {_value(item)}" for name, item in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, bool | int | str):
        return json.dumps(value)
    if isinstance(value, float):
        return f"{value:.2f}"
    raise TypeError(f"{value!r} of type {type(value).__name__} has no place in a table.")


def _key(name: str) -> str:
    return name if name.replace("-", "_").isidentifier() else json.dumps(name)
