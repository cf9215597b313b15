"""What an agent does first: it says who it is, and makes signals readable."""

import os
import platform
import signal
import socket

from stretto.launch import environment
from stretto.launch.process.detection import detect
from stretto.launch.supervision import host_checks
from stretto.launch.supervision.child import STACKS_SIGNAL
from stretto.launch.supervision.wire import Message


def introduction(environ: dict[str, str]) -> Message:
    """The place of this agent, its first message to the supervisor."""
    launched = detect(environ)
    index, count = (launched.process_id, launched.num_processes) if launched else (0, 1)
    own, first = map(environ.get, (environment.AGENT_INDEX, environment.AGENT_FIRST))
    if own or first:
        index, count = int(own) if own else index + int(first or 0), None
    return {
        "index": index,
        "count": count,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "versions": {
            "python": platform.python_version(),
            **host_checks.versions("stretto", "jax"),
        },
    }


def signal_pipe() -> socket.socket:
    """A socket that becomes readable with the numbers of the signals that arrive."""
    read_end, write_end = socket.socketpair()
    for end in (read_end, write_end):
        end.setblocking(False)
    signal.set_wakeup_fd(write_end.detach())
    # Ignored signals stay ignored in a new program: a worker asked for its stacks before it has
    # its handler does not die of the question.
    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    return read_end
