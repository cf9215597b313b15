"""The ``stretto`` command: finds the subcommand and turns its errors into one line and a status."""

import importlib
import os
import signal
import sys
from collections.abc import Sequence

from stretto.launch.errors import LaunchError

# Subcommand: where its `main(argv) -> int` is, and what it does. Imported only when called, so
# that help is quick and one command's needs are not another's.
_COMMANDS = {
    "run": ("stretto.launch.commands.run", "start a script in the processes of a job"),
    "doctor": ("stretto.launch.doctor.command", "what this machine can do, and what is wrong"),
    "bench": (
        "stretto.benchmarks.commands.bench",
        "measure kernels and show the time they could take",
    ),
    "plan": (
        "stretto.benchmarks.commands.plan",
        "predict the time of a training step on many GPUs",
    ),
    "tune": ("stretto.benchmarks.commands.tune", "find the best configuration of a kernel here"),
    "explain": (
        "stretto.benchmarks.commands.explain",
        "which implementation a call takes on some GPUs, and why",
    ),
    "simulate": (
        "stretto.launch.commands.simulate",
        "run a script's kernels in the simulator on a CPU",
    ),
    "compile": (
        "stretto.launch.commands.compile",
        "compile a script's kernels for GPUs, without a GPU",
    ),
}


def usage() -> str:
    """The help of ``stretto`` itself."""
    lines = ["usage: stretto COMMAND ...", "", "Multi-GPU kernels for JAX.", ""]
    lines += [f"  stretto {name:<10}{purpose}" for name, (_, purpose) in _COMMANDS.items()]
    lines += ["", "stretto COMMAND --help lists its options."]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a ``stretto`` command line and return its exit status."""
    _open_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    command, *rest = arguments
    if command == "--version":
        from importlib.metadata import version

        print(f"stretto {version('stretto')}")
        return 0
    if command not in _COMMANDS:
        print(f"stretto: {_unknown(command)}", file=sys.stderr)
        return 2
    try:
        return importlib.import_module(_COMMANDS[command][0]).main(rest)
    except LaunchError as error:
        print(f"stretto {command}: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # as in `stretto run ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _open_standard_streams() -> None:
    """Where a standard stream was closed, as by ``>&-``, open the null device in its place.

    Else the next file that is opened takes its number, and gets what is written there.
    """
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)
            os.set_inheritable(fd, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(fd, mode, closefd=False))


def _unknown(command: str) -> str:
    from difflib import get_close_matches

    close = get_close_matches(command, _COMMANDS, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(_COMMANDS)}"
    return f"there is no command {command!r}; {hint}"
