"""Which processes ``--tee`` names."""

import re

from stretto.launch.errors import LaunchError

_PART = re.compile(r"^(\d+)(?:-(\d+))?$")


def parse_ranks(text: str, num_processes: int | None) -> frozenset[int] | None:
    """Process ids of ``0,4-7``; empty for ``none``, None for ``all``.

    Args:
      text: the value of the option.
      num_processes: how many the job has; None lets the list name more.

    Raises:
      LaunchError: it means nothing, or names a process that the job does not have.
    """
    if text == "all":
        return None
    if text == "none":
        return frozenset()
    ranks: set[int] = set()
    for part in text.split(","):
        match = _PART.match(part.strip())
        if match is None:
            raise LaunchError(f"--tee {text}: {part!r} is no process; write all, none or 0,4-7")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise LaunchError(f"--tee {text}: {part!r} counts backwards; write {last}-{first}")
        if num_processes is not None and last >= num_processes:
            raise LaunchError(
                f"--tee {text} names process {last}, and the job has 0 to {num_processes - 1}"
            )
        ranks.update(range(first, last + 1))
    return frozenset(ranks)
