"""A process between the supervisor and mpirun or srun, so that nothing of them outlives the job.

Run as ``python keeper.py FOLDER SECONDS PROGRAM ARGS``. It ends with the program and with its
status. When its standard input ends, since the supervisor has let go or was killed, it asks the
program to end, and SECONDS later ends all that this started (such as ssh to other hosts, in
sessions of their own). It removes FOLDER.
"""

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys

from stretto.launch.supervision import descendants

_LOOK_S = 0.05


def main() -> int:
    """Run the program to its end, or to the end of standard input; returns its status."""
    folder, grace_s, *argv = sys.argv[1:]
    descendants.adopt_orphans()
    try:
        program = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"{argv[0]} cannot be started: {error.strerror}", file=sys.stderr)
        return 127
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if not _ends_first(program):
        _end(program, float(grace_s))
    descendants.kill_all()
    shutil.rmtree(folder, ignore_errors=True)
    status = program.wait()
    return status if status >= 0 else 128 - status


def _ends_first(program: subprocess.Popen) -> bool:
    """Whether the program ends before standard input does."""
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        while program.poll() is None:
            if selector.select(_LOOK_S) and not os.read(sys.stdin.fileno(), 1):
                return False
    return True


def _end(program: subprocess.Popen, grace_s: float) -> None:
    program.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.wait(grace_s)


if __name__ == "__main__":
    sys.exit(main())
