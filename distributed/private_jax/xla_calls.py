"""Calls from a CPU program to Python that are answered later, and from any thread.

A callback of JAX's holds one of XLA's threads until it returns. Those threads are few, and a
program that waits in one for its peers may hold the very thread that a peer needs. The foreign
function interface of XLA lets a call be answered later instead: it returns a future at once, and
the program of that device continues where the future is completed.

The interface is public (`jax.ffi`), but meant for C. The structures here are those of jaxlib's
`include/xla/ffi/api/c_api.h`, version 0.1 and later: XLA serves each version for a year. Checked on
0.11.2 and 0.12.0.1.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from ctypes import POINTER, Structure, addressof, c_char_p, c_int, c_int64, c_size_t, c_void_p
from dataclasses import dataclass
from typing import Any

import jax

_MAJOR, _MINOR = 0, 1
_INTERNAL = 13  # A code of `absl::Status`.
_INSTANTIATE = 0  # The stage of a handler that is called once for each place in a program.

_SIGNATURE = ctypes.CFUNCTYPE(c_void_p, c_void_p)  # Of handlers, and of the interface's functions.
_libc = ctypes.CDLL(None)
_libc.malloc.restype, _libc.malloc.argtypes = c_void_p, [c_size_t]


class _Version(Structure):
    _fields_ = [("size", c_size_t), ("extension", c_void_p), ("major", c_int), ("minor", c_int)]


class _Metadata(Structure):
    _fields_ = [("size", c_size_t), ("version", _Version), ("traits", ctypes.c_uint32)]


class _Extension(Structure):
    """The only one there is: a request for `metadata`, in place of a call."""

    _fields_ = [
        ("size", c_size_t), ("type", c_int), ("next", c_void_p), ("metadata", POINTER(_Metadata))
    ]  # fmt: skip


class _Api(Structure):
    _fields_ = [
        ("size", c_size_t), ("extension", c_void_p), ("version", _Version), ("internal", c_void_p),
        *[(name, c_void_p) for name in (
            "Error_Create", "Error_GetDetails", "Error_Destroy", "Handler_Register", "Stream_Get",
            "Type_Register", "InvokeContext_Get", "State_Set", "State_Get",
            "DeviceMemory_Allocate", "DeviceMemory_Free", "ThreadPool_Schedule",
            "ThreadPool_NumThreads", "Future_Create", "Future_SetAvailable", "Future_SetError",
            "RunId_Get",
        )],
    ]  # fmt: skip


class _Values(Structure):
    """Operands or results: `items` point to `_Buffer`s."""

    _fields_ = [
        ("size", c_size_t), ("extension", c_void_p), ("count", c_int64), ("types", c_void_p),
        ("items", POINTER(c_void_p)),
    ]  # fmt: skip


class _Attributes(Structure):
    """Attributes in the order of their names; `items` point to `_Scalar`s."""

    _fields_ = [
        ("size", c_size_t), ("extension", c_void_p), ("count", c_int64), ("types", c_void_p),
        ("names", c_void_p), ("items", POINTER(c_void_p)),
    ]  # fmt: skip


class _Frame(Structure):
    _fields_ = [
        ("size", c_size_t), ("extension", POINTER(_Extension)), ("api", POINTER(_Api)),
        ("context", c_void_p), ("stage", c_int), ("operands", _Values), ("results", _Values),
        ("attributes", _Attributes), ("future", c_void_p),
    ]  # fmt: skip


class _Buffer(Structure):
    _fields_ = [
        ("size", c_size_t), ("extension", c_void_p), ("dtype", c_int), ("data", c_void_p),
        ("rank", c_int64), ("dimensions", c_void_p),
    ]  # fmt: skip


class _Scalar(Structure):
    _fields_ = [("dtype", c_int), ("value", POINTER(c_int64))]


class _Type(Structure):
    _fields_ = [("size", c_size_t), ("extension", c_void_p), ("deleter", c_void_p)]


class _Arguments(Structure):
    """Of any function of the interface that takes up to four values of eight bytes."""

    _fields_ = [("size", c_size_t), ("extension", c_void_p), *[(n, c_void_p) for n in "abcd"]]


class _TypeRegistration(Structure):
    _fields_ = [
        ("size", c_size_t), ("extension", c_void_p), ("name", c_char_p), ("length", c_size_t),
        ("type_id", c_void_p), ("type", c_void_p),
    ]  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A call that one device's program has made, and that is not answered yet.

    Attributes:
      key: the attribute that the call was lowered with.
      run: the execution of the program: the same number on all of its devices, and on no others.
      site: the place of the call in the compiled program: two copies of one function have two.
      operands, results: addresses of the arrays, there until the call is answered.
    """

    key: int
    run: int
    site: int
    operands: list[int]
    results: list[int]
    _api: _Api
    _future: int

    def finish(self) -> None:
        """Delivers the results: the program of this device continues, in this thread.

        It may not come back for long, and not before other devices have come to a collective of
        XLA's: a thread that answers another device's call afterwards may never get there.
        """
        _invoke(self._api, "Future_SetAvailable", self._future)

    def fail(self, message: str) -> None:
        """The call ends in an error, and the program of this device with it."""
        _invoke(self._api, "Future_SetError", self._future, _error(self._api, message))


def register(name: str, receive: Callable[[Call], None]) -> None:
    """Has custom calls of `name` in CPU programs call `receive`, on one of XLA's threads.

    The custom call has one attribute, an int64 (`Call.key`), and side effects.
    """

    def execute(frame: _Frame) -> None:
        api, context = frame.api.contents, frame.context
        site = _invoke(api, "State_Get", context, _INSTANTIATE, addressof(_site_type), None).d
        future = _invoke(api, "Future_Create", None).a
        call = Call(
            key=_Scalar.from_address(frame.attributes.items[0]).value[0],
            run=_invoke(api, "RunId_Get", context, None).b or 0,
            site=site,
            operands=_addresses(frame.operands),
            results=_addresses(frame.results),
            _api=api,
            _future=future,
        )
        receive(call)
        frame.future = future

    def instantiate(frame: _Frame) -> None:
        api = frame.api.contents
        with _registering:
            if not _site_type.value:
                _register_site_type(api)
        state = _libc.malloc(1)  # XLA frees it with the program: until then its address is unique.
        _invoke(api, "State_Set", frame.context, frame.stage, addressof(_site_type), state)

    stages = {"instantiate": _handler(instantiate), "execute": _handler(execute)}
    _kept.extend(stages.values())
    capsules = {stage: jax.ffi.pycapsule(function) for stage, function in stages.items()}
    jax.ffi.register_ffi_target(name, capsules, platform="cpu")


_kept: list[Any] = []  # What XLA has the address of.
_site_type = c_int64(0)
_registering = threading.Lock()


def _handler(function: Callable[[_Frame], None]) -> Any:
    """`function` as a handler of XLA's; what it raises becomes the error of the call."""

    def handle(address: int) -> int | None:
        frame = _Frame.from_address(address)
        try:
            if frame.extension:
                version = _Version(ctypes.sizeof(_Version), None, _MAJOR, _MINOR)
                frame.extension.contents.metadata.contents.version = version
            else:
                function(frame)
        except Exception as error:
            return _error(frame.api.contents, f"{type(error).__name__}: {error}")
        return None

    return _SIGNATURE(handle)


def _invoke(api: _Api, name: str, *values: int | None) -> _Arguments:
    """Calls a function of the interface; returns its arguments, some of which it has set."""
    arguments = _Arguments(16 + 8 * len(values), None, *values)
    error = _SIGNATURE(getattr(api, name))(addressof(arguments))
    if error:
        raise RuntimeError(f"XLA_FFI_{name}: {_text_of(api, error)}")
    return arguments


def _error(api: _Api, message: str) -> int | None:
    """An error of XLA's, which takes over the text."""
    text = c_char_p(message.encode())
    pointer = ctypes.cast(text, c_void_p).value
    arguments = _Arguments(32, None, pointer, _INTERNAL)
    return _SIGNATURE(api.Error_Create)(addressof(arguments))


def _text_of(api: _Api, error: int) -> str:
    details = _Arguments(40, None, error, None, None)
    _SIGNATURE(api.Error_GetDetails)(addressof(details))
    text = ctypes.string_at(details.b).decode() if details.b else "no message"
    _SIGNATURE(api.Error_Destroy)(addressof(_Arguments(24, None, error)))
    return text


def _register_site_type(api: _Api) -> None:
    name = b"stretto_site"
    site = _Type(ctypes.sizeof(_Type), None, ctypes.cast(_libc.free, c_void_p).value)
    _kept.append(site)
    registration = _TypeRegistration(
        ctypes.sizeof(_TypeRegistration), None, name, len(name), addressof(_site_type),
        addressof(site),
    )  # fmt: skip
    error = _SIGNATURE(api.Type_Register)(addressof(registration))
    if error:
        raise RuntimeError(f"XLA_FFI_Type_Register: {_text_of(api, error)}")


def _addresses(values: _Values) -> list[int]:
    found = (_Buffer.from_address(values.items[i]).data for i in range(values.count))
    return [address or 0 for address in found]
