"""Runs a user's script in one process of a job, so that its failure is known at once.

Started by the agent as ``python worker.py SCRIPT ARGS``, or ``-m MODULE ARGS``; imports the
standard library only and nothing of Stretto, so a script pays for what it imports itself.

An uncaught exception prints its traceback, is recorded for the agent, and ends the process
with ``os._exit``: the usual exit would wait in JAX's exit barrier for processes that are
themselves waiting for this one.
"""

import contextlib
import ctypes
import faulthandler
import json
import os
import runpy
import signal
import sys
import threading
import traceback
from pathlib import Path
from types import TracebackType

_PR_SET_PDEATHSIG = 1
_WORKER_PIPES = "STRETTO_WORKER_PIPES"  # as in environment.py, which is not imported here
_PROGRESS = "STRETTO_PROGRESS"
_RECORD = "STRETTO_RECORD"
# As in supervision/child.py. A real-time signal: SIGUSR1 and SIGUSR2 are the script's.
_STACKS_SIGNAL = int(getattr(signal, "SIGRTMAX", signal.SIGUSR1 + 1)) - 1
_NUM_PROCESSES = "STRETTO_NUM_PROCESSES"
_NOT_THE_USERS = (__file__, "<frozen runpy>", runpy.__file__)
_INTERRUPTED_STATUS = 128 + signal.SIGINT
_HALF_OF_LONGEST = 64 << 10


def main() -> None:
    """Run the script named on the command line as ``__main__``."""
    fds = map(int, os.environ.pop(_WORKER_PIPES).split(","))
    record_fd, stacks_fd, progress_fd, agent_pid = fds
    _die_with(agent_pid)
    for fd in (record_fd, stacks_fd, progress_fd):
        os.set_inheritable(fd, False)
    os.environ[_PROGRESS] = _target(progress_fd)
    os.environ[_RECORD] = record = _target(record_fd)
    faulthandler.enable(all_threads=False)
    faulthandler.register(_STACKS_SIGNAL, file=stacks_fd, all_threads=True)
    del sys.argv[0]
    script = sys.argv[0]
    is_module = script == "-m"
    try:
        if is_module:
            del sys.argv[0]
            _find_modules_in_working_directory()
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            _find_modules_beside(script)
            runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        status = _exit_status(error)
        if status != 0:
            _tell(record, {"status": status, "traceback": ""})
            _leave(status)
    except BaseException as error:
        trace = below(None if is_module else script, error.__traceback__)
        error.__traceback__ = trace
        _show(error, trace)
        text = "".join(traceback.format_exception(type(error), error, trace))
        status = _INTERRUPTED_STATUS if isinstance(error, KeyboardInterrupt) else 1
        _tell(record, {"status": status, "traceback": _clipped(text)})
        _leave(status)
    _tell_if_alone(record)
    _tell_that_it_finished(record)
    # Now the ordinary exit, with atexit and JAX's barrier.


def _target(fd: int) -> str:
    """A descriptor, the process that it is for, and the file that it is: as in heartbeat.py."""
    file = os.fstat(fd)
    return f"{fd},{os.getpid()},{file.st_dev},{file.st_ino}"


def _tell(target: str, message: dict) -> None:
    """Write a line for the agent.

    Not in a child that the script forked, whose end is not this process's, and not where the script
    has closed the descriptor, whose number may be that of a file of its own by now.
    """
    fd = int(target.partition(",")[0])
    line = json.dumps(message).encode("ascii") + b"\n"
    with contextlib.suppress(OSError):
        while line and _target(fd) == target:
            line = line[os.write(fd, line) :]


def _tell_that_it_finished(record: str) -> None:
    """Once nothing of the script runs any more; others may still wait for this process."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread():
            thread.join()
    _tell(record, {"finished": True})


def _die_with(agent_pid: int) -> None:
    """Have the kernel kill this process when its agent dies, even by SIGKILL (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != agent_pid:
        os._exit(1)


def _find_modules_beside(script: str) -> None:
    """Let a script import the files beside it, as plain ``python SCRIPT`` does.

    Not for a script at the root of Stretto's own tree: there ``distributed`` and ``kernels``
    would hide the well-known packages of these names.
    """
    folder = Path(script).resolve().parent
    if folder != Path(__file__).resolve().parent.parent:
        sys.path.insert(0, str(folder))


def _find_modules_in_working_directory() -> None:
    """As ``python -m`` does; last of all where that is Stretto's own tree, for the same reason."""
    folder = Path.cwd()
    is_own = folder.resolve() == Path(__file__).resolve().parent.parent
    sys.path.insert(len(sys.path) if is_own else 0, str(folder))


def _tell_if_alone(record: str) -> None:
    """Tell the agent if the script used JAX and did not join the other processes of its job."""
    jax = sys.modules.get("jax")
    is_one_of_many = int(os.environ.get(_NUM_PROCESSES, "1")) > 1
    if jax is None or not is_one_of_many:
        return
    with contextlib.suppress(AttributeError):  # as by an import that failed half-way
        if not jax.distributed.is_initialized():
            _tell(record, {"alone": True})


def _exit_status(error: SystemExit) -> int:
    """The status that ``sys.exit(error.code)`` means; prints a message as Python would."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def below(script: str | None, trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that starts in the script or, if None, in a module that was run.

    None where all of it is this file's and runpy's, as of a script that is no Python.
    """
    frame = trace
    is_ours = True
    while frame is not None:
        name = frame.tb_frame.f_code.co_filename
        if name == script or (script is None and name not in _NOT_THE_USERS):
            return frame
        is_ours = is_ours and name in _NOT_THE_USERS
        frame = frame.tb_next
    return None if is_ours else trace


def _show(error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception as Python would, by the script's own hook if that works."""
    try:
        sys.excepthook(type(error), error, trace)
    except BaseException:
        sys.__excepthook__(type(error), error, trace)


def _clipped(text: str) -> str:
    """A text for the report, which says the beginning and the end of a very long one."""
    if len(text) <= 2 * _HALF_OF_LONGEST:
        return text
    left_out = len(text) - 2 * _HALF_OF_LONGEST
    middle = f"\n... {left_out} characters, which stderr and the log have ...\n"
    return text[:_HALF_OF_LONGEST] + middle + text[-_HALF_OF_LONGEST:]


def _leave(status: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a closed pipe must not hide the first error
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
