"""Lines by which a worker reports to its agent: a failure, its end, a program it compiled.

A script has the same descriptor, and may write anything there.
"""

import json

from stretto.launch.supervision.wire import Message

KINDS = {"program": dict, "alone": bool, "finished": bool, "joins": bool}
_FAILURE = {"status": int, "traceback": str}


def parse_record(line: str) -> Message | None:
    """A worker's report; None for any other line, which a script wrote."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    forms = [_FAILURE, *({name: kind} for name, kind in KINDS.items())]
    if not isinstance(record, dict) or not any(_has(record, form) for form in forms):
        return None
    program = record.get("program", {"text": "", "digest": "", "processes": []})
    if not _has(program, {"text": str, "digest": str, "processes": list}):
        return None
    return record if all(type(number) is int for number in program["processes"]) else None


def _has(record: Message, form: dict[str, type]) -> bool:
    return all(type(record.get(name)) is kind for name, kind in form.items())
