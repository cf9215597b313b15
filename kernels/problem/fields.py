"""Whether the fields of a caller's configuration have the types that are annotated."""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Any

import numpy as np


def check_fields(config: Any) -> None:
    """Raises ValueError for a field of another type, also inside nested configurations.

    None and integers are no flags, and a flag is no integer: Python would take each for the other.
    """
    for name, kinds in _fields(type(config)):
        value = getattr(config, name)
        if Any not in kinds and not any(_is_of(value, kind) for kind in kinds):
            wanted = " or ".join(map(_named, kinds))
            raise ValueError(
                f"{_named(type(config))}: {name}={value!r:.60} is of type {_named(type(value))};"
                f" it must be of type {wanted}."
            )
        if dataclasses.is_dataclass(value):
            check_fields(value)


def _is_of(value: Any, kind: type) -> bool:
    if kind is int:
        return isinstance(value, int | np.integer) and not isinstance(value, bool)
    return isinstance(value, kind)


def _named(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


@functools.cache
def _fields(kind: type) -> list[tuple[str, tuple[Any, ...]]]:
    """The fields of a dataclass, and the types that each may have."""
    hints = typing.get_type_hints(kind)
    return [
        (field.name, typing.get_args(hints[field.name]) or (hints[field.name],))
        for field in dataclasses.fields(kind)
    ]
