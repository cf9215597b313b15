"""The programs that start agents: run, listened to, and ended with all that they started."""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from stretto.launch.errors import LaunchError
from stretto.launch.planning.launchers import AgentCommand

_EXIT_LIMIT_S = 1.0  # beyond the grace
_EXIT_GRACE_S = 1.5
_EXIT_GRACE_OF_EACH_S = 0.02  # of two cores, for an agent and its worker
_LOOK_S = 0.02
_MOST_LINES = 1000
_KEEPER = (sys.executable, "-P", "-m", "stretto.launch.supervision.keeper")


def exit_grace_s(num_processes: int) -> float:
    """How long mpirun or srun may take to end, with daemons and folders of its own, in seconds."""
    return _EXIT_GRACE_S + _EXIT_GRACE_OF_EACH_S * num_processes


class Launchers:
    """Each command as a child of the supervisor, in a session of its own.

    Args:
      selector: registers their output.
      num_processes: how many agents there are.

    Attributes:
      output: the last lines that they wrote themselves.
    """

    def __init__(self, selector: selectors.BaseSelector, num_processes: int = 1):
        self.output: list[str] = []
        self._selector = selector
        self._num_processes = num_processes
        self._programs: list[subprocess.Popen[bytes]] = []
        self._pipes: set[int] = set()

    def start(
        self, commands: Sequence[AgentCommand], environ: Mapping[str, str], folder: Path | None
    ) -> None:
        """Run the commands; one that starts agents in its turn gets a keeper.

        Args:
          commands: what to run.
          environ: their environment, beside what each adds.
          folder: goes with the job, even if the supervisor is killed.

        Raises:
          LaunchError: the operating system starts no more of them.
        """
        for command in commands:
            keeper = (*_KEEPER, str(folder or ""), str(exit_grace_s(self._num_processes)))
            if not command.starts_others:
                keeper = ()
            read_end, write_end = os.pipe()
            try:
                program = subprocess.Popen(
                    [*keeper, *command.argv],
                    stdin=subprocess.PIPE if keeper else subprocess.DEVNULL,
                    stdout=write_end,
                    stderr=write_end,
                    env={**environ, **command.environ},
                    start_new_session=True,
                )
            except OSError as error:
                os.close(read_end)
                raise LaunchError(
                    f"{len(self._programs)} of {len(commands)} programs could be started, and then "
                    f"none ({error.strerror}); see ulimit -a, or start fewer processes"
                ) from None
            finally:
                os.close(write_end)
            self._programs.append(program)
            self._pipes.add(read_end)
            self._selector.register(read_end, selectors.EVENT_READ, self._on_output)

    def have_ended(self) -> bool:
        """Whether everything that was to start agents is gone."""
        return all(program.poll() is not None for program in self._programs)

    def end(self) -> None:
        """Leave nothing of them running: let keepers end them, then by signals."""
        for program in self._programs:
            if program.stdin is not None:
                program.stdin.close()
        limit_s = _EXIT_LIMIT_S + exit_grace_s(self._num_processes)
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            for program in self._programs:
                if number is not None and program.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(program.pid, number)
            until = time.monotonic() + limit_s
            while time.monotonic() < until and not self.have_ended():
                time.sleep(_LOOK_S)
        for pipe in list(self._pipes):
            self._close(pipe)

    def _on_output(self, pipe: int) -> None:
        data = os.read(pipe, 1 << 16)
        self.output += data.decode(errors="replace").splitlines()
        del self.output[:-_MOST_LINES]
        if not data:
            self._close(pipe)

    def _close(self, pipe: int) -> None:
        self._selector.unregister(pipe)
        self._pipes.discard(pipe)
        os.close(pipe)
