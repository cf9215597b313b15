"""What is written to ``stretto run`` goes to process 0, a piece at a time.

The supervisor sends the next piece when the agent says that the process has taken the last one, so
that neither holds more than one. A terminal is read in the foreground only.
"""

import contextlib
import errno
import functools
import os
import select
import signal
import sys
import threading
import time

_PIECE = 32 << 10
_BACKGROUND_S = 0.5


@functools.cache
def source() -> int:
    """A pipe's end that gives this process's standard input, and its end; the same on every call.

    A thread copies into it, since files and terminals cannot all be waited for together with
    connections. It is one for all attempts: a restart reads on where the last one stopped.
    """
    read_end, write_end = os.pipe()
    if sys.stdin is None:  # closed, as by `<&-`: the number may be something else's by now
        os.close(write_end)
        return read_end
    fd = sys.stdin.fileno()
    if os.isatty(fd):
        # In the background, a read then fails and does not stop the whole job.
        signal.signal(signal.SIGTTIN, signal.SIG_IGN)
    threading.Thread(target=_copy, args=(fd, write_end), daemon=True).start()
    return read_end


def read_piece(fd: int) -> bytes:
    """The next piece of the source; empty at its end."""
    return os.read(fd, _PIECE)


def _copy(fd: int, write_end: int) -> None:
    while True:
        try:
            select.select([fd], [], [])
            data = os.read(fd, _PIECE)
        except OSError as error:
            if error.errno == errno.EIO and os.isatty(fd):
                time.sleep(_BACKGROUND_S)
                continue
            data = b""
        if not data:
            break
        while data:
            data = data[os.write(write_end, data) :]
    os.close(write_end)


class Sink:
    """The worker's standard input on its agent's side; never blocks."""

    def __init__(self, fd: int):
        self._fd = fd
        self._rest = b""
        os.set_blocking(fd, False)

    def fileno(self) -> int:
        """The descriptor, so that a selector takes a sink."""
        return self._fd

    def put(self, data: bytes) -> bool:
        """Write a piece; whether all of it went out. No data ends the input.

        Raises:
          OSError: the worker does not read any more.
        """
        if not data:
            self.close()
            return False
        self._rest = data
        return self.flush()

    def flush(self) -> bool:
        """Go on writing; whether all has gone out. Raises OSError as ``put``."""
        with contextlib.suppress(BlockingIOError):
            while self._rest:
                self._rest = self._rest[os.write(self._fd, self._rest) :]
        return not self._rest

    def close(self) -> None:
        """Close the descriptor, once."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
