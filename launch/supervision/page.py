"""One file or terminal that takes the text of several sources: whose line is whose.

Each line belongs to one source and begins with its prefix. A line that is not complete yet, such
as a question or a progress bar, is shown once its source pauses; it goes on where it was, unless
another source has written since.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

PAUSE_S = 0.2
_LONGEST_WAIT_S = 1.0
_MOST_HELD = 8 << 20


@dataclass
class _Source:
    prefix: bytes
    rest: bytearray  # of a line that is not complete, not shown yet
    first_at: float = 0.0
    last_at: float = 0.0


class Page:
    """Sets the text of sources into lines.

    Args:
      hides: says of a complete line, without its newline, whether it is left out.
    """

    def __init__(self, hides: Callable[[bytes], bool] = lambda _: False):
        self._hides = hides
        self._sources: dict[Hashable, _Source] = {}
        self._written: dict[Hashable, _Source] = {}  # those that may hold something back
        self._open: Hashable = None  # whose line is shown and not complete

    def add(self, name: Hashable, prefix: bytes, data: bytes, now: float) -> bytes:
        """Take in what a source wrote; what is to be shown of it at once."""
        source = self._sources.setdefault(name, _Source(prefix, bytearray()))
        if not source.rest:
            source.first_at = now
        source.last_at = now
        source.rest += data
        self._written[name] = source
        end = source.rest.rfind(b"\n", -len(data) if data else 0) + 1
        shown = b""
        if end > 0:
            lines = bytes(source.rest[:end]).split(b"\n")[:-1]
            del source.rest[:end]
            source.first_at = now
            shown = b"".join(self._set(name, source, line, complete=True) for line in lines)
        if len(source.rest) > _MOST_HELD:
            shown += self._show_rest(name, source)
        return shown

    def due(self, now: float) -> bytes:
        """What is to be shown because its source has paused, or has gone on for long."""
        return b"".join(
            self._show_rest(name, source)
            for name, source in self._held()
            if now >= source.last_at + PAUSE_S or now >= source.first_at + _LONGEST_WAIT_S
        )

    @property
    def holds_back(self) -> bool:
        """Whether ``due`` will have something later."""
        return bool(self._held())

    def _held(self) -> list[tuple[Hashable, _Source]]:
        """The sources with a part of a line that is not shown yet."""
        found = [(name, source) for name, source in self._written.items() if _shown_part(source)]
        self._written = dict(found)
        return found

    def end(self, name: Hashable) -> bytes:
        """The source writes no more: its last line is complete as it is."""
        source = self._sources.pop(name, None)
        self._written.pop(name, None)
        if source is None or not (source.rest or self._open == name):
            return b""
        return self._set(name, source, bytes(source.rest), complete=True)

    def close_line(self) -> bytes:
        """Before something else is written: a newline if a line is shown and not complete."""
        was_open, self._open = self._open, None
        return b"" if was_open is None else b"\n"

    def _show_rest(self, name: Hashable, source: _Source) -> bytes:
        part = _shown_part(source)
        del source.rest[: len(part)]
        return self._set(name, source, part, complete=False)

    def _set(self, name: Hashable, source: _Source, text: bytes, *, complete: bool) -> bytes:
        goes_on = self._open == name
        if complete and not goes_on and self._hides(text):
            return b""
        start = b"" if goes_on else self.close_line() + source.prefix
        self._open = None if complete else name
        # A carriage return goes back to the start of the line, where the prefix is.
        inside, returns = (text[:-1], b"\r") if text.endswith(b"\r") else (text, b"")
        shown = inside.replace(b"\r", b"\r" + source.prefix) + returns
        return start + shown + (b"\n" if complete else b"")


def _shown_part(source: _Source) -> bytes:
    """The rest of a line but for a carriage return at its end: what it returns for is to come."""
    return bytes(source.rest.removesuffix(b"\r"))
