"""The mesh of devices that a kernel runs on, and how it names them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence


class DeviceMesh:
    """Axes of a `jax.sharding.Mesh`: a device is its row-major index.

    Args:
      names: axis names.
      sizes: axis sizes.
      reverse: the kernel counts its devices from the end along every axis. Coordinates and device
        ids are the kernel's, devices those of the mesh.
    """

    def __init__(self, names: Sequence[Hashable], sizes: Sequence[int], *, reverse: bool = False):
        self.names = tuple(names)
        self.sizes = tuple(sizes)
        self.num_devices = math.prod(self.sizes)
        self._reverse = reverse

    def coords(self, device: int) -> dict[Hashable, int]:
        """Coordinates of `device`, by axis."""
        return self._split(self.called(device))

    def called(self, number: int) -> int:
        """The device that the kernel calls `number`, and the other way round."""
        is_reverse = self._reverse and 0 <= number < self.num_devices
        return self.num_devices - 1 - number if is_reverse else number

    def _split(self, device: int) -> dict[Hashable, int]:
        out = {}
        for name, size in reversed(list(zip(self.names, self.sizes, strict=True))):
            device, out[name] = divmod(device, size)
        return out

    def linear(self, coords: Sequence[int]) -> int:
        """The device at `coords`, one for each axis in order."""
        if len(coords) != len(self.sizes):
            raise ValueError(f"device id {tuple(coords)} needs one index for each of {self.names}.")
        device = 0
        for index, size in zip(coords, self.sizes, strict=True):
            device = device * size + index
        return self.called(device)

    def linear_from_axes(self, own: int, axes: dict[Hashable, int]) -> int:
        """The device named by some axes; the others are those of device `own`.

        A key may be a tuple of axes, whose index counts them row-major.
        """
        coords = self.coords(own)
        for key, index in axes.items():
            names = key if isinstance(key, tuple) and key not in coords else (key,)
            for name in reversed(names):
                if name not in coords:
                    raise ValueError(f"device id names axis {name!r}; the mesh has {self.names}.")
                size = self.sizes[self.names.index(name)]
                index, coords[name] = divmod(index, size) if len(names) > 1 else (0, index)
        return self.linear([coords[n] for n in self.names])

    def along(self, own: int, axes: Sequence[Hashable]) -> list[int]:
        """All devices that differ from `own` only along `axes`, `own` among them."""
        flat = [a for axis in axes for a in (axis if isinstance(axis, tuple) else (axis,))]
        coords = self.coords(own)
        choices = [
            range(size) if name in flat else (coords[name],)
            for name, size in zip(self.names, self.sizes, strict=True)
        ]
        return [self.linear(c) for c in itertools.product(*choices)]

    def describe(self, device: int) -> str:
        """Device in words."""
        if len(self.names) < 2:
            return f"device {device}"
        where = ", ".join(f"{n}={i}" for n, i in self._split(device).items())
        return f"device {device} ({where})"
