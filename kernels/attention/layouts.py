"""How the tokens of one sequence are split between devices: in a row, or in zigzag.

`contiguous`: device i of n holds the i-th of n equal parts. `zigzag`: the sequence is cut into 2n
chunks, and device i holds chunks i and 2n - 1 - i, one from both ends. Under a causal mask the
devices then have equal work; with `contiguous` the last one has (2n - 1) / n of the mean.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from stretto.distributed.devices.axes import AxisNames, axis_size, canonical_axes
from stretto.kernels.problem import checks
from stretto.kernels.problem.numpy_arrays import takes_numpy_arrays
from stretto.kernels.problem.promotion import by_default_rules

CONTIGUOUS, ZIGZAG = "contiguous", "zigzag"
LAYOUTS = (CONTIGUOUS, ZIGZAG)


@takes_numpy_arrays
@by_default_rules
def to_zigzag(x: jax.Array, devices: int, *, axis: int = 1) -> jax.Array:
    """A whole sequence in the order in which `devices` devices hold it in zigzag.

    Args:
      x: any array, for example tokens `[batch, tokens]` before they are placed on a mesh.
      devices: that the sequence is split between.
      axis: of the tokens; may be negative.

    Returns:
      The same tokens in another order. Cut it into `devices` equal parts: part i is device i's.

    Raises:
      ValueError: the tokens are no multiple of twice the devices, or `axis` is out of range.
    """
    chunks = _chunks("to_zigzag", x, devices, axis)
    return _joined(jnp.take(chunks, jnp.array(zigzag_order(devices)), axis % x.ndim), x)


@takes_numpy_arrays
@by_default_rules
def from_zigzag(x: jax.Array, devices: int, *, axis: int = 1) -> jax.Array:
    """The inverse of `to_zigzag`: tokens in the order of the sequence.

    Arguments and errors are those of `to_zigzag`.
    """
    chunks = _chunks("from_zigzag", x, devices, axis)
    order = zigzag_order(devices)
    inverse = jnp.array([order.index(chunk) for chunk in range(2 * devices)])
    return _joined(jnp.take(chunks, inverse, axis % x.ndim), x)


@by_default_rules
def token_positions(tokens: int, axis_name: AxisNames, *, layout: str = CONTIGUOUS) -> jax.Array:
    """The positions of this device's tokens in the whole sequence, inside `jax.shard_map`.

    Rotary embeddings of queries and keys need them, whatever the layout.

    Args:
      tokens: of this device.
      axis_name: mesh axis, or tuple of axes, that the sequence is split along.
      layout: "contiguous" or "zigzag".

    Returns:
      int32 `[tokens]`, counted from 0.

    Raises:
      ValueError: an unknown layout or axis, or an odd number of tokens in zigzag.
    """
    axes = canonical_axes(axis_name)
    tokens = checks.check_integer("token_positions", "tokens", tokens)
    if isinstance(tokens, int) and tokens < 0:
        raise ValueError(f"token_positions: tokens={tokens} must not be negative.")
    check_layout("token_positions", layout, tokens=tokens)
    return Span(layout, axis_size(axes), lax.axis_index(axes)).positions(tokens)


def zigzag_order(devices: int) -> list[int]:
    """The chunks' numbers, in the order in which the devices hold them."""
    return [chunk for i in range(devices) for chunk in (i, 2 * devices - 1 - i)]


def check_layout(op: str, layout: str, **tokens: int) -> None:
    """Raises ValueError for an unknown `layout`, or numbers of `tokens` that it cannot split."""
    if layout not in LAYOUTS:
        known = ", ".join(map(repr, LAYOUTS))
        raise ValueError(f"{op}: layout={layout!r} is not one of {known}.")
    for name, count in tokens.items():
        if layout == ZIGZAG and isinstance(count, int) and count % 2:
            raise ValueError(
                f"{op}: {name}={count} of a device must be even for layout='zigzag', which holds a"
                f" chunk from both ends; pad the sequence, or pass layout='contiguous'."
            )


@dataclasses.dataclass(frozen=True)
class Span:
    """Which tokens of a whole sequence a device holds.

    Attributes:
      layout: "contiguous" or "zigzag".
      devices: that hold the sequence.
      device: this device's number; a Python integer, or an array at run time.
    """

    layout: str
    devices: int
    device: jax.Array | int

    @property
    def chunks(self) -> int:
        """Chunks of a device, each a stretch of the sequence: 1, or 2 in zigzag."""
        return 2 if self.layout == ZIGZAG and self.devices > 1 else 1

    @property
    def numbers(self) -> list[jax.Array | int]:
        """The numbers of the device's chunks, in the order in which it holds them."""
        late = 2 * self.devices - 1 - self.device
        return [self.device, late][: self.chunks]

    @property
    def limits(self) -> list[int]:
        """For each of the device's chunks, the most that its number can be on any device."""
        return [self.devices - 1, 2 * self.devices - 1][: self.chunks]

    def positions(self, tokens: int) -> jax.Array:
        """Positions of the device's tokens in the sequence, int32 `[tokens]`."""
        within = jnp.arange(tokens // self.chunks, dtype=jnp.int32)
        starts = [number * (tokens // self.chunks) for number in self.numbers]
        return jnp.concatenate([jnp.asarray(start, jnp.int32) + within for start in starts])

    def all_positions(self, tokens: int) -> jax.Array:
        """Positions of all devices' tokens, device by device, int32 `[devices * tokens]`."""
        spans = [dataclasses.replace(self, device=i) for i in range(self.devices)]
        return jnp.concatenate([span.positions(tokens) for span in spans])

    def in_order(self, x: jax.Array) -> jax.Array:
        """All devices' tokens, `[batch, tokens, ...]` by device, in the order of the sequence."""
        return from_zigzag(x, self.devices) if self.chunks > 1 else x

    def by_device(self, x: jax.Array) -> jax.Array:
        """The inverse of `in_order`."""
        return to_zigzag(x, self.devices) if self.chunks > 1 else x


def _chunks(op: str, x: jax.Array, devices: int, axis: int) -> jax.Array:
    """`x` with its axis of tokens cut into twice as many chunks as devices."""
    axis = checks.check_array_axis(op, "axis", axis, x)
    if checks.check_integer(op, "devices", devices) < 1:
        raise ValueError(f"{op}: devices={devices} must be at least 1.")
    count = 2 * devices
    if isinstance(x.shape[axis], int) and x.shape[axis] % count:
        raise ValueError(
            f"{op}: dimension {axis}={x.shape[axis]} must be a multiple of {count}, two chunks for"
            f" each of devices={devices}; pad the sequence."
        )
    return x.reshape(*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :])


def _joined(chunks: jax.Array, like: jax.Array) -> jax.Array:
    return chunks.reshape(like.shape)
