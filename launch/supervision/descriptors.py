"""Room for the connections, log files and pipes of a job's processes among open files."""

import resource

from stretto.launch.errors import LaunchError

_OF_EACH = 3  # its connection, its log file, and the output of its agent where we start that
_OTHERS = 128


def make_room(num_processes: int) -> None:
    """Raise this process's own limit of open files, if so many processes need it.

    Raises:
      LaunchError: the machine does not allow it.
    """
    need = _OTHERS + _OF_EACH * num_processes
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= need:
        return
    if hard != resource.RLIM_INFINITY and hard < need:
        raise LaunchError(
            f"{num_processes} processes need {need} open files here, and {hard} are allowed; raise "
            "the hard limit (ulimit -Hn), or start fewer processes"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
