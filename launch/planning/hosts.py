"""Hosts as people write them: hostfiles and lists."""

import re
from collections.abc import Mapping

from stretto.launch.errors import LaunchError
from stretto.launch.planning.layout import HostDevices
from stretto.launch.planning.network import same_host
from stretto.launch.planning.survey import is_this_host

_SLOTS = re.compile(r"^(?P<key>max[_-]slots|slots)\s*=\s*(?P<value>\S+)$")


def parse_hostfile(
    text: str, source: str, default_devices: int | Mapping[str, int]
) -> list[HostDevices]:
    """Hosts of a hostfile, a line each: ``NAME [slots=N] [max_slots=N]``.

    ``#`` starts a comment; blank lines, tabs and CRLF are fine; ``NAME`` may be ``user@host`` or
    an IPv6 address. A host named again adds to its slots, also by its full name in place of its
    short one, or as ``localhost``. ``NAME:N`` is MPICH's way to say slots.

    Args:
      text: the file's content.
      source: its name, for errors.
      default_devices: slots of a host that names none, for all or for each by its name.

    Raises:
      LaunchError: a line that means nothing; names file and line.
    """
    slots: dict[str, int] = {}
    limits: dict[str, int] = {}
    names = _Names()
    for number, line in enumerate(text.splitlines(), start=1):
        words = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split()
        if not words:
            continue
        where = f"{source}, line {number}"
        name, count = _name_and_count(words[0], where)
        if not name.rpartition("@")[2] or name.startswith("-"):  # ssh would take an option
            raise LaunchError(f"{where}: {words[0]!r} names no host")
        name = names.first_of(name)
        for word in words[1:]:
            match = _SLOTS.match(word)
            if match is None:
                raise LaunchError(f"{where}: {word!r} is not slots=N or max_slots=N")
            value = _positive(match["value"], word, where)
            if match["key"] == "slots":
                count = value
            else:
                limits[name] = value
        if count is None:
            count = default_devices if isinstance(default_devices, int) else default_devices[name]
        slots[name] = slots.get(name, 0) + count
    if not slots:
        raise LaunchError(f"{source} names no host; write one a line, such as: node1 slots=4")
    return [HostDevices(name, min(n, limits.get(name, n))) for name, n in slots.items()]


class _Names:
    """The first of several names of a host."""

    def __init__(self):
        self._by_label: dict[str, list[str]] = {}
        self._own: str | None = None

    def first_of(self, name: str) -> str:
        """The name that was met first of the host with this one, perhaps this one."""
        host = name.rpartition("@")[2]
        if is_this_host(host):
            self._own = self._own or name
            return self._own
        label = host.lower().partition(".")[0]
        alike = self._by_label.setdefault(host if label.isdecimal() else label, [])
        for one in alike:
            if same_host(one.rpartition("@")[2], host):
                return one
        alike.append(name)
        return name


def parse_hosts(text: str, default_devices: int | Mapping[str, int]) -> list[HostDevices]:
    """Hosts of ``--hosts a:4,b:4``."""
    lines = "\n".join(part.strip() for part in text.split(","))
    return parse_hostfile(lines, f"--hosts {text}", default_devices)


def _name_and_count(word: str, where: str) -> tuple[str, int | None]:
    """A host and the count of ``host:4`` or ``[IPv6]:4``; a bare IPv6 address has no count."""
    if word.startswith("["):
        name, bracket, rest = word[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise LaunchError(f"{where}: {word!r} is not [ADDRESS] or [ADDRESS]:N")
        return name, _positive(rest[1:], word, where) if rest else None
    if word.count(":") == 1:
        name, _, count = word.partition(":")
        return name, _positive(count, word, where)
    return word, None


def _positive(text: str, word: str, where: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise LaunchError(f"{where}: {word!r} needs a number of at least 1")
    return int(text)
