"""XLA's options: of the environment, and as JAX has them, only as a serialised message.

Checked on JAX 0.11.2 and 0.12.0.1.
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxlib import xla_client

from stretto.distributed import settings, xla_flags

# Numbers of fields in XLA's `CompileOptionsProto`, `ExecutableBuildOptionsProto`, `DebugOptions`;
# and of a value of the last one's `CommandBufferCmdType`.
BUILD_OPTIONS, DEBUG_OPTIONS, RECORDED_COMMANDS = 3, 3, 258
CUSTOM_CALL = 7


def why_kernels_are_recorded() -> str | None:
    """Why XLA would record kernels in command buffers, which they do not stand; None if not."""
    message = xla_client.CompileOptions().SerializeAsString()
    for number in (BUILD_OPTIONS, DEBUG_OPTIONS, RECORDED_COMMANDS):
        message = b"".join(value for n, value in _fields(message) if n == number)
    if CUSTOM_CALL not in message:
        return None
    return (
        "XLA would record kernels in command buffers, where they miss it when a peer's buffers"
        " move: it had read its flags before Stretto was imported. Import stretto before JAX is"
        f" first used, or set XLA_FLAGS={xla_flags.NO_RECORDED_KERNELS} in the environment."
    )


def decides_on_slices() -> bool:
    """Whether the environment says whether slices become part of calls."""
    return xla_flags.decides_on_slices(settings.environ())


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """(number, content) of the fields of a protocol buffer that have a length."""
    sizes = {1: 8, 5: 4}  # of the wire types that have a fixed one
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            _, at = _varint(message, at)
        elif wire == 2:
            size, at = _varint(message, at)
            yield number, message[at : at + size]
            at += size
        else:
            at += sizes[wire]


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """The number that begins at `at`, seven bits a byte; and where it ends."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
