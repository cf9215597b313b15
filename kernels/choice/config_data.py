"""A kernel's configuration as the data that a tuned table holds, and back."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from stretto.kernels.problem.machine import HOPPER

RENAMED = {"whole": "gather_first", "apart": "unfused"}
"""Fields of a `Config` that tables of earlier versions have under other names."""


def to_data(config: Any) -> dict[str, Any]:
    """The fields of a `Config`, nested ones as dictionaries, as a table holds them."""
    return dataclasses.asdict(config)


def from_data(config_type: type, data: Mapping[str, Any], architecture: str = HOPPER) -> Any:
    """The `Config` with these fields (also by their `RENAMED` names), the others at their defaults.

    Where a field may be of several types, it is of the one for `architecture`.

    Raises:
      TypeError: `data` has a field that `config_type` lacks.
    """
    hints = typing.get_type_hints(config_type)
    arguments = {}
    for given, value in data.items():
        name = RENAMED.get(given, given)
        if isinstance(value, Mapping) and name in hints:
            kinds = typing.get_args(hints[name]) or (hints[name],)
            kind = next((k for k in kinds if _architecture_of(k) == architecture), kinds[0])
            value = from_data(kind, value, architecture)
        arguments[name] = value
    return config_type(**arguments)


def _architecture_of(kind: type) -> str | None:
    return getattr(kind, "architecture", None)
