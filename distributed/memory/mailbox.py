"""Where a kernel writes its report of a wait that passed its limit, before it stops.

A kernel cannot print: any call in it, also one that is never made, makes the compiler serialise
the tensor cores (ptxas, C7510). So it writes a record to a page of the host's memory and traps. The
page outlives the CUDA context. A thread of the host watches it and prints what it finds; the
exception that JAX raises next gets the same text (`explain`).

The page lies at the same address in every process, so that all compile the same program.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import dataclasses
import functools
import mmap
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Generator, Iterator

import jax

from stretto.distributed.devices import cuda
from stretto.distributed.errors import KernelTimeoutError

PREFERRED_ADDRESS = 0x1F53_5452_0000
MAX_DEVICES = 64  # Records; devices of larger meshes share them. A power of two.
RECORD_WORDS = 16
RECORD_BYTES = 4 * RECORD_WORDS
PAGE_BYTES = MAX_DEVICES * RECORD_BYTES
MAX_INDICES = 3
WRITTEN = 0x5354_5254
POLL_S = 0.2
_MAP_FIXED_NOREPLACE = 0x10_0000
_HOST_REGISTER_PORTABLE_AND_MAPPED = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """A wait as the source names it.

    `limit_s` is in seconds; `devices` are the places in the mesh of the devices that the kernel
    knows by number, if they are others. `awaits_start`: by its index, a GPU's start is waited for.
    """

    kernel: str
    semaphore: str
    limit_s: float
    devices: tuple[int, ...] = ()
    awaits_start: bool = False

    @property
    def key(self) -> int:
        """What a record holds for it: the same in every process, and from run to run."""
        return zlib.crc32(f"{self.kernel}/{self.semaphore}".encode()) & 0x7FFF_FFFF


_sites: dict[int, Site] = {}
_numbered = contextvars.ContextVar[tuple[int, ...]]("numbered", default=())


@contextlib.contextmanager
def devices_numbered(places: tuple[int, ...]) -> Generator[None]:
    """Sites that are registered inside know their devices by number, at `places` in the mesh."""
    token = _numbered.set(() if places == tuple(range(len(places))) else places)
    try:
        yield
    finally:
        _numbered.reset(token)


def register(site: Site) -> int:
    """Makes `site` known to `read`, and returns its key."""
    site = dataclasses.replace(site, devices=_numbered.get())
    _sites[site.key] = site
    return site.key


# A record, as words of 32 bits; a kernel writes `WRITTEN` last.
_FIELDS = ("written", "site", "device", "block_x", "block_y", "block_z", "wanted", "seen", "rank")


def read() -> list[str]:
    """The reports that this process's kernels have left, one line each."""
    page = _page()
    if page is None:
        return []
    lines = []
    for device in range(MAX_DEVICES):
        words = page[device * RECORD_WORDS : (device + 1) * RECORD_WORDS]
        if words[0] == WRITTEN:
            record: dict[str, int] = dict(zip(_FIELDS, words, strict=False))
            lines.append(_describe(record, words[len(_FIELDS) :]))
    return lines


def _describe(record: dict[str, int], indices: list[int]) -> str:
    site = _sites.get(record["site"], Site(kernel="?", semaphore="?", limit_s=float("nan")))
    device = record["device"]
    if device < len(site.devices):
        device = site.devices[device]
    position = "".join(f"[{i}]" for i in indices[: record["rank"]])
    late = f": GPU {indices[0]} of this node has not come to it" if site.awaits_start else ""
    return (
        f"kernel {site.kernel} gave up after {site.limit_s:g} s: process {jax.process_index()},"
        f" device {device}, block ({record['block_x']}, {record['block_y']},"
        f" {record['block_z']}) waits for semaphore {site.semaphore}{position} >="
        f" {record['wanted']}, which is {record['seen']}{late}"
    )


def address() -> int:
    """The page's address, the same for the host and for all GPUs of this process.

    The first call makes the page known to CUDA and starts the watch. Without GPUs, where kernels
    are only compiled, it is the address that the page would have.
    """
    with _making:
        return _made()


_making = threading.Lock()


@functools.cache
def _made() -> int:
    page_address, page = _map()
    if any(device.platform == "gpu" for device in jax.local_devices()):
        _share_with_gpus(page_address)
        _pages.append((ctypes.c_int32 * (PAGE_BYTES // 4)).from_address(page_address))
        threading.Thread(target=_watch, name="stretto-mailbox", daemon=True).start()
        sys.excepthook = functools.partial(_excepthook, sys.excepthook)
    _kept.append(page)
    return page_address


_pages: list = []
_kept: list = []


def _page() -> list[int] | None:
    return list(_pages[0]) if _pages else None


def _map() -> tuple[int, object]:
    """A page of memory at the preferred address, or where the system puts it if that is taken."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    for wanted, extra in ((PREFERRED_ADDRESS, _MAP_FIXED_NOREPLACE), (None, 0)):
        found = libc.mmap(wanted, PAGE_BYTES, protection, flags | extra, -1, 0)
        if found not in (None, ctypes.c_void_p(-1).value):
            return found, libc
    raise OSError(ctypes.get_errno(), "cannot map a page of memory for the kernels' reports")


def _share_with_gpus(page_address: int) -> None:
    """Registers the page with CUDA, portably: for every context of this process."""
    pointer, host = ctypes.c_uint64(), ctypes.c_void_p(page_address)
    flags = _HOST_REGISTER_PORTABLE_AND_MAPPED
    with cuda.context_of(jax.local_devices()[0].local_hardware_id):
        cuda.call("cuMemHostRegister_v2", host, ctypes.c_size_t(PAGE_BYTES), flags)
        cuda.call("cuMemHostGetDevicePointer_v2", ctypes.byref(pointer), host, 0)
    if pointer.value != page_address:
        raise OSError("this system gives GPUs other addresses of host memory than the host's own")


def _watch() -> None:
    """Prints every report once, as it arrives."""
    known: set[str] = set()
    while True:
        for line in read():
            if line not in known:
                known.add(line)
                print(f"stretto: {line}", file=sys.stderr, flush=True)
        time.sleep(POLL_S)


def explain(error: BaseException) -> KernelTimeoutError | None:
    """The error for a kernel's report in place of JAX's `error`, or None without a report."""
    if not isinstance(error, jax.errors.JaxRuntimeError):
        return None
    lines = read()
    return KernelTimeoutError("; ".join(lines)) if lines else None


@contextlib.contextmanager
def kernel_errors() -> Iterator[None]:
    """Raises a kernel's report as `KernelTimeoutError`, in place of JAX's error.

    Put it around calls that wait for results (`block_until_ready`, a conversion to NumPy). Without
    it, a program that ends with JAX's error prints the report as its last line.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        explained = explain(error)
        if explained is None:
            raise
        raise explained from error


def _excepthook(previous: Callable, kind: type, error: BaseException, trace: object) -> None:
    """Shows a report as the last line of the traceback that ends the program."""
    explained = explain(error)
    if explained is None:
        previous(kind, error, trace)
        return
    traceback.print_exception(kind, error, error.__traceback__)
    explained.__cause__ = None
    previous(type(explained), explained, None)
