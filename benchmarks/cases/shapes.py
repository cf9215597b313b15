"""Problem sizes as text, and by name of a set; the sets themselves are in the operations' records.

The sizes of an operation are written in its record's order: `MxKxN` of a matmul, `MxN` of a
collective. `kernels/operations/examples.py` says what they are the sizes of.
"""

from __future__ import annotations

import re

from stretto.kernels.operation import Operation, Sizes
from stretto.kernels.operations import KNOWN, OPERATIONS


def text_of(sizes: Sizes) -> str:
    """The sizes as text: "8192x8192x28672"."""
    return "x".join(map(str, sizes.values()))


def form_of(operation: Operation) -> str:
    """The form of an operation's sizes as text: "MxKxN"."""
    return "x".join(name.upper() for name in operation.sizes)


def set_names() -> tuple[str, ...]:
    """The names of all operations' sets."""
    every = (name for operation in OPERATIONS.values() for name in operation.examples.sets)
    return tuple(dict.fromkeys(every))


def operation_named(name: str) -> Operation:
    """The record called `name`; ValueError with the known names if there is none."""
    if name not in KNOWN:
        raise ValueError(f"kernel {name!r} is not one of {', '.join(KNOWN)}, all.")
    return KNOWN[name]


def parse_shape(text: str, operation: Operation) -> Sizes:
    """The sizes that `text` spells, by name.

    Raises:
      ValueError: `text` has no sizes, another number of sizes than the operation, or a 0.
    """
    form = form_of(operation)
    if not re.fullmatch(r"\d+(x\d+)+", text):
        known = ", ".join(set_names())
        raise ValueError(f"shape {text!r} is neither a set ({known}) nor sizes such as {form}.")
    sizes = [int(size) for size in text.split("x")]
    if len(sizes) != len(operation.sizes):
        raise ValueError(f"shape {text!r} has {len(sizes)} sizes; {operation.name} takes {form}.")
    if 0 in sizes:
        raise ValueError(f"shape {text!r} has a size of 0; every size must be positive.")
    return dict(zip(operation.sizes, sizes, strict=True))


def suits(text: str, operation: Operation) -> bool:
    """Whether `text` is the name of a set, or has as many sizes as the operation."""
    return text in set_names() or text.count("x") + 1 == len(operation.sizes)


def shapes_of(text: str, operation: Operation, devices: int) -> tuple[Sizes, ...]:
    """The sizes of the set `text` for this number of devices, or the sizes that `text` has.

    Empty where the set has none for this operation (for example "gpt-3" of a collective).

    Raises:
      ValueError: `text` is neither the name of a set nor sizes of the operation.
    """
    if text not in set_names():
        return (parse_shape(text, operation),)
    return tuple(operation.examples.shapes(text, devices))


def scaled(sizes: Sizes, devices: int) -> Sizes:
    """`devices` times as many rows (the first size): as much work for each device as one had."""
    rows = next(iter(sizes))
    return {**sizes, rows: sizes[rows] * devices}


def rehearsed(sizes: Sizes) -> Sizes:
    """Small sizes in place of these, the larger the larger these are."""
    return {name: size if size <= 64 else 16 * size.bit_length() for name, size in sizes.items()}
