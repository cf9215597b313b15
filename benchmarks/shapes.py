"""Problem sizes by name: the one list that tests, benchmarks and tuning take their shapes from.

A matmul's shape is `MxKxN`, the whole problem over all devices; a collective's is `MxN`, the whole
tensor: the gathered one for `all_gather`, each device's operand for `reduce_scatter` and
`all_reduce`, and all devices' operands together for `all_to_all`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

MATMULS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
KERNELS = MATMULS + COLLECTIVES


@dataclasses.dataclass(frozen=True, order=True)
class Shape:
    """`m` x `k` x `n` of a matmul, or `m` x `n` of a collective, where `k` is 0."""

    m: int
    k: int
    n: int

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n}" if self.k else f"{self.m}x{self.n}"

    def scaled(self, devices: int) -> Shape:
        """`devices` times as many rows: the same work per device on that many (weak scaling)."""
        return dataclasses.replace(self, m=self.m * devices)

    def rehearsed(self) -> Shape:
        """A small shape in place of this one, the larger the larger this is."""
        m, k, n = (
            size if size <= 64 else 16 * size.bit_length() for size in (self.m, self.k, self.n)
        )
        return Shape(m, k, n)


def parse_shape(text: str, kernel: str) -> Shape:
    """`"8192x8192x28672"` (a matmul) or `"8192x8192"` (a collective) as a `Shape`.

    Raises:
      ValueError: `text` is not of that form, or not of the form that `kernel` takes.
    """
    need = 3 if kernel in MATMULS else 2
    if not re.fullmatch(r"\d+(x\d+){1,2}", text):
        raise ValueError(
            f"shape {text!r} is neither a set ({', '.join(SETS)}) nor sizes such as"
            f" {'MxKxN' if need == 3 else 'MxN'}."
        )
    sizes = [int(part) for part in text.split("x")]
    if len(sizes) != need:
        form = "MxKxN" if need == 3 else "MxN"
        raise ValueError(f"shape {text!r} has {len(sizes)} sizes; {kernel} takes {form}.")
    if 0 in sizes:
        raise ValueError(f"shape {text!r} has a size of 0; every size must be positive.")
    return Shape(sizes[0], sizes[1], sizes[2]) if need == 3 else Shape(sizes[0], 0, sizes[1])


def shapes_of(name: str, kernel: str, devices: int) -> tuple[Shape, ...]:
    """The shapes of set `name` for `kernel` on `devices` devices, or the one shape that it spells.

    Empty where the set has none for this kernel (for example "gpt-3" of a collective).

    Raises:
      ValueError: `name` is neither a set nor a shape, or `kernel` is unknown.
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel {kernel!r} is not one of {', '.join(KERNELS)}.")
    if name not in SETS:
        return (parse_shape(name, kernel),)
    return tuple(SETS[name](kernel, devices))


def _flipped(kernel: str, m: int, k: int, n: int) -> Shape:
    """The layer's second matmul where `kernel` reduces: the long dimension is contracted."""
    return Shape(m, k, n) if kernel == "all_gather_matmul" else Shape(m, n, k)


def _tiny(kernel: str, devices: int) -> list[Shape]:
    del devices
    if kernel in MATMULS:
        return [Shape(256, 128, 128), Shape(128, 256, 192)]
    return [Shape(64, 0, 32), Shape(256, 0, 128)]


def _square(kernel: str, devices: int) -> list[Shape]:
    del devices
    sizes = (2048, 4096, 8192, 16384, 32768)
    return [Shape(s, s if kernel in MATMULS else 0, s) for s in sizes]


def _llama(kernel: str, devices: int) -> list[Shape]:
    del devices
    if kernel not in MATMULS:
        return []
    wide = [_flipped(kernel, m, 8192, 28672) for m in (512, 1024, 2048, 4096, 8192, 16384)]
    attention = Shape(8192, 8192, 10240 if kernel == "all_gather_matmul" else 8192)
    return [*wide, attention]


def _gpt3(kernel: str, devices: int) -> list[Shape]:
    del devices
    return [_flipped(kernel, 4096, 12288, 49152)] if kernel in MATMULS else []


def _decode(kernel: str, devices: int) -> list[Shape]:
    del devices
    if kernel not in MATMULS:
        return []
    return [_flipped(kernel, m, 8192, 28672) for m in (1, 8, 32, 64, 128, 256)]


def _awkward_of(kernel: str, devices: int, per_device: list[tuple[int, int, int]]) -> list[Shape]:
    """Per-device sizes (m_shard, k, n_shard), the odd one always in the dimension that is cut."""
    if kernel == "all_gather_matmul":
        return [Shape(m * devices, k, n * devices) for m, k, n in per_device]
    if kernel in MATMULS:
        return [Shape(m * devices, k * devices, n) for m, k, n in per_device]
    rows = devices if kernel == "all_to_all" else 1
    return sorted({Shape(m * devices * rows, 0, n) for m, _, n in per_device})


def _awkward(kernel: str, devices: int) -> list[Shape]:
    product = [
        (m, k, n) for m in (1, 63, 65, 1000, 4091) for n in (8, 136, 200) for k in (8, 72, 4104)
    ]
    return _awkward_of(kernel, devices, product)


def _awkward_few(kernel: str, devices: int) -> list[Shape]:
    few = [(1, 4104, 136), (63, 8, 200), (65, 72, 8), (1000, 4104, 200), (4091, 4104, 136)]
    return _awkward_of(kernel, devices, few)


def _latency(kernel: str, devices: int) -> list[Shape]:
    """512 B to 64 KB in 16-bit types."""
    del devices
    if kernel in MATMULS:
        return []
    return [Shape(1 << power, 0, 16) for power in (4, 6, 8, 10, 11)]


def _bandwidth(kernel: str, devices: int) -> list[Shape]:
    """64 KB to 256 MB in 16-bit types."""
    del devices
    if kernel in MATMULS:
        return []
    return [Shape(1 << power, 0, 2048) for power in range(4, 17, 2)]


def _goals(kernel: str, devices: int) -> list[Shape]:
    """The shapes that the documented times are given for."""
    if kernel in MATMULS:
        return [
            Shape(8192, 8192, 8192),
            _flipped(kernel, 8192, 8192, 28672),
            *_gpt3(kernel, devices),
            Shape(16384, 16384, 16384),
            _flipped(kernel, 2048, 8192, 28672),
        ]
    return [*_latency(kernel, devices)[::2], Shape(4096, 0, 8192), Shape(8192, 0, 8192)]


SETS: dict[str, Callable[[str, int], list[Shape]]] = {
    "tiny": _tiny,
    "goals": _goals,
    "square": _square,
    "llama-70b": _llama,
    "gpt-3": _gpt3,
    "decode": _decode,
    "awkward": _awkward,
    "awkward-few": _awkward_few,
    "latency": _latency,
    "bandwidth": _bandwidth,
}
