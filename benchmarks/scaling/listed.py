"""Calls of operations in a file, planned on numbers of GPUs."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Annotated

import msgspec

from stretto.benchmarks.cases import shapes
from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.errors import BenchmarkError, UnavailableError
from stretto.benchmarks.predict.calls import call_time
from stretto.benchmarks.predict.model import model
from stretto.benchmarks.scaling.planned import SCHEMA, CallsPlan, PlannedCall
from stretto.benchmarks.targets.machine_file import Target

TYPES = ("bfloat16", "float16", "float32")


class ListedCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A call: the operation's name, its shape as `stretto bench` takes it, and how often."""

    operation: str
    shape: str
    type: str = "bfloat16"
    times: Annotated[int, msgspec.Meta(ge=1)] = 1


class _File(msgspec.Struct, forbid_unknown_fields=True):
    call: list[ListedCall]


def is_list(path: pathlib.Path) -> bool:
    """Whether a file is a list of calls, and not a model."""
    try:
        return any(line.strip() == "[[call]]" for line in path.read_text().splitlines())
    except (OSError, UnicodeDecodeError):
        return False


def read(path: pathlib.Path) -> list[ListedCall]:
    """The calls in a file.

    Raises:
      BenchmarkError: it is damaged, or names an operation, a shape or a type that there is not.
    """
    try:
        found = msgspec.toml.decode(path.read_bytes(), type=_File).call
    except (OSError, msgspec.DecodeError) as error:
        raise BenchmarkError(
            f'{path}: {error}; a call is [[call]] with operation = "all_gather_matmul" and'
            ' shape = "8192x8192x8192".'
        ) from None
    for one in found:
        try:
            shapes.parse_shape(one.shape, shapes.operation_named(one.operation))
        except ValueError as error:
            raise BenchmarkError(f"{path}: {error}") from None
        if one.type not in TYPES:
            raise BenchmarkError(f"{path}: type {one.type!r} is not one of {', '.join(TYPES)}.")
    return found


def plan(found: Sequence[ListedCall], counts: Sequence[int], target: Target) -> CallsPlan:
    """The time of every call on every number of GPUs."""
    calls = [planned(one, count, target) for one in found for count in counts]
    return CallsPlan(schema=SCHEMA, machine=target.name, origin=target.origin, calls=calls)


def planned(one: ListedCall, gpus: int, target: Target) -> PlannedCall:
    """The time of one call on so many GPUs, or why it has none."""
    operation = shapes.operation_named(one.operation)
    sizes = shapes.parse_shape(one.shape, operation)
    case = Case(operation=operation, sizes=sizes, dtype=one.type, devices=gpus)
    found = PlannedCall(
        operation=one.operation, shape=one.shape, type=one.type, gpus=gpus, times=one.times
    )
    try:
        time = call_time(model(), case, target)
    except UnavailableError as error:
        return msgspec.structs.replace(found, skipped=str(error))
    whole = time.time.times(one.times)
    return msgspec.structs.replace(
        found,
        us=whole.us,
        low_us=whole.low,
        high_us=whole.high,
        exposed_us=time.exposed_us * one.times,
        way=time.way,
        beyond=list(whole.beyond),
    )
