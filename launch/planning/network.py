"""Addresses and ports: what this host answers to, what it can reach, whether its name resolves."""

import socket
import struct
import sys
import threading
from collections.abc import Iterable

_SIOCGIFADDR = 0x8915
_RESOLVE_TIMEOUT_S = 5.0
LOOPBACK = "127.0.0.1"


def host_name() -> str:
    """This host's name, as it calls itself."""
    return socket.gethostname()


def interface_addresses(interface: str | None = None) -> list[str]:
    """This host's IPv4 addresses (of one interface, if named), the loopback's left out."""
    if sys.platform != "linux":
        return [a for a in _resolve_all(socket.gethostname()) if not a.startswith("127.")]
    import fcntl

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            if interface is not None and name != interface:
                continue
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # an interface without an IPv4 address
            address = socket.inet_ntoa(answer[20:24])
            if not address.startswith("127."):
                found.append(address)
    return found


def _resolve_all(name: str) -> list[str]:
    try:
        return sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})
    except OSError:
        return []


def resolve(name: str, timeout_s: float = _RESOLVE_TIMEOUT_S) -> list[str]:
    """The addresses of a host name; empty if it has none or no answer came in time."""
    result: list[str] = []
    thread = threading.Thread(target=lambda: result.extend(_resolve_all(name)), daemon=True)
    thread.start()
    thread.join(timeout_s)
    return list(result)


def listen(address: str, port: int = 0) -> socket.socket:
    """A listening TCP socket. Raises ``OSError`` if the port is taken."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
        sock.listen(512)
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
