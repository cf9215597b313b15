"""Words that several reports use."""

from __future__ import annotations

from collections.abc import Iterable


def devices(numbers: Iterable[int]) -> str:
    """Devices in words, such as "devices 0, 1 and 3"."""
    names = [str(n) for n in sorted(set(numbers))]
    if not names:
        return "nobody"
    if len(names) == 1:
        return f"device {names[0]}"
    return f"devices {', '.join(names[:-1])} and {names[-1]}"
