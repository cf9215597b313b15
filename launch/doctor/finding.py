"""What a check found: a level, a sentence, and the way out if something is wrong."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report.

    ``error`` means that jobs, or a requested layout, cannot run; ``warning`` that
    something works less well or only in part. Both come with a ``way_out``.
    """

    topic: str
    level: Level
    text: str
    way_out: str = ""


def ok(topic: str, text: str) -> Finding:
    """Something that is as it should be."""
    return Finding(topic, "ok", text)


def warning(topic: str, text: str, way_out: str) -> Finding:
    """Something that works in part."""
    return Finding(topic, "warning", text, way_out)


def error(topic: str, text: str, way_out: str) -> Finding:
    """Something that stops jobs."""
    return Finding(topic, "error", text, way_out)


def count(findings: Sequence[Finding], level: Level) -> int:
    """How many findings have a level."""
    return sum(finding.level == level for finding in findings)
