"""Addresses and ports: what this host answers to, what it can reach, whether its name resolves."""

import ipaddress
import socket
import struct
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

_SIOCGIFADDR = 0x8915
_RESOLVE_TIMEOUT_S = 5.0
_BACKLOG = 4096  # as many as Linux takes unless told otherwise: all agents may come at once
_GLOBAL_SCOPE = "00"  # of the addresses in /proc/net/if_inet6
LOOPBACK = "127.0.0.1"
ANY = ""
"""To listen on all addresses of a host."""


def host_name() -> str:
    """This host's name, as it calls itself."""
    return socket.gethostname()


def is_loopback(address: str) -> bool:
    """Whether an address means the host that uses it."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def same_host(one: str, other: str) -> bool:
    """Whether two names are of one host, one perhaps in full: ``node1`` and ``node1.cluster.org``.

    Names are compared, not addresses, and without regard to case.
    """
    short, long = sorted((one.lower().rstrip("."), other.lower().rstrip(".")), key=len)
    return short == long or (bool(short) and "." not in short and long.startswith(f"{short}."))


def interface_addresses(interface: str | None = None) -> list[str]:
    """This host's addresses (of one interface, if named), IPv4 first, the loopback's left out.

    Of IPv6 those that need no interface beside them.
    """
    if sys.platform != "linux":
        return [a for a in _resolve_all(socket.gethostname()) if not is_loopback(a)]
    names = [name for _, name in socket.if_nameindex() if interface in (None, name)]
    found = [address for name in names for address in (_ipv4(name), *_ipv6(name)) if address]
    found = [address for address in found if not is_loopback(address)]
    return sorted(found, key=lambda address: ":" in address)


def _ipv4(interface: str) -> str | None:
    import fcntl

    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None  # an interface without an IPv4 address
    return socket.inet_ntoa(answer[20:24])


def _ipv6(interface: str) -> list[str]:
    try:
        table = Path("/proc/net/if_inet6").read_text()
    except OSError:
        return []
    rows = (line.split() for line in table.splitlines())
    return [
        socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
        for digits, _, _, scope, _, name in rows
        if name == interface and scope == _GLOBAL_SCOPE
    ]


def is_this_host(name: str) -> bool:
    """Whether a host's name, or address, means this machine."""
    own = interface_addresses()
    return name == socket.gethostname() or any(
        address in own or is_loopback(address) for address in resolve(name)
    )


def endpoint(address: str, port: int) -> str:
    """``address:port``, in brackets if the address is IPv6's."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _resolve_all(name: str) -> list[str]:
    try:
        return sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})
    except OSError:
        return []


def resolve(name: str) -> list[str]:
    """The addresses of a host name; empty if it has none or no answer came in time."""
    result: list[str] = []
    thread = threading.Thread(target=lambda: result.extend(_resolve_all(name)), daemon=True)
    thread.start()
    thread.join(_RESOLVE_TIMEOUT_S)
    return list(result)


def listen(address: str, port: int = 0, *, receive_buffer: int = 0) -> socket.socket:
    """A listening TCP socket; its connections have a receive buffer of so many bytes, if given.

    Raises:
      OSError: the port is taken.
    """
    is_ipv6 = ":" in address or (address == ANY and socket.has_dualstack_ipv6())
    sock = socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if is_ipv6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address != ANY))
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def free_port(address: str = LOOPBACK) -> int:
    """A TCP port that nothing listens on at the moment."""
    with listen(address) as sock:
        return sock.getsockname()[1]


def port_is_taken(address: str, port: int) -> bool:
    """Whether nothing more can listen on the port of an address of this host."""
    try:
        listen(address, port).close()
    except OSError:
        return True
    return False


def connect(addresses: Iterable[str], port: int, timeout_s: float) -> socket.socket | None:
    """Connect to the first address that answers, each given ``timeout_s``; None if none does."""
    for address in addresses:
        try:
            sock = socket.create_connection((address, port), timeout=timeout_s)
        except OSError:
            continue
        sock.settimeout(None)
        return sock
    return None
