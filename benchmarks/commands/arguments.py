"""Comma-separated lists on the command line."""

from __future__ import annotations

from stretto.benchmarks.errors import BenchmarkError
from stretto.kernels.operations import OPERATIONS

KERNELS_HELP = f"{', '.join(OPERATIONS)}; or all."
SETS = dict.fromkeys(name for record in OPERATIONS.values() for name in record.examples.sets)
SHAPES_HELP = (
    f"Shape sets ({', '.join(SETS)}) or sizes (8192x8192x28672, 8192x8192), comma separated."
)


def split(text: str) -> tuple[str, ...]:
    """The words of a comma-separated list."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def counts_of(text: str) -> tuple[int, ...]:
    """Device counts in a comma-separated list; BenchmarkError if that is not what it is."""
    try:
        return tuple(int(count) for count in split(text))
    except ValueError:
        raise BenchmarkError(f"device counts {text!r} are not like 1,2,4.") from None


def check_least(option: str, value: float | None, least: float) -> None:
    """Raises BenchmarkError if a number is less than it may be, or is none; None is fine."""
    if value is not None and not value >= least:
        raise BenchmarkError(f"{option} {value:g} must be at least {least:g}.")
