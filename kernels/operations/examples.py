"""Problem sizes by name: the one list that tests, benchmarks and tuning take their shapes from.

A matmul's sizes are those of the whole problem over all devices. A collective's are those of the
whole tensor: the gathered one for `all_gather`, each device's operand for `reduce_scatter` and
`all_reduce`, and all devices' operands together for `all_to_all`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from stretto.kernels.operation import Sizes

MATMUL_SETS = (
    "tiny",
    "goals",
    "square",
    "llama-70b",
    "gpt-3",
    "decode",
    "awkward",
    "awkward-few",
    "nodes",
)
COLLECTIVE_SETS = (
    "tiny",
    "goals",
    "square",
    "awkward",
    "awkward-few",
    "latency",
    "bandwidth",
    "nodes",
)
ROWS_OF_LLAMA = (512, 1024, 2048, 4096, 8192, 16384)
ROWS_OF_DECODING = (1, 8, 32, 64, 128, 256)
SIDES = (2048, 4096, 8192, 16384, 32768)
# Of one device, m x k x n, the odd one always in the dimension that is cut.
AWKWARD_FEW = ((1, 4104, 136), (63, 8, 200), (65, 72, 8), (1000, 4104, 200), (4091, 4104, 136))
AWKWARD = tuple(
    (m, k, n)
    for m, n, k in itertools.product((1, 63, 65, 1000, 4091), (8, 136, 200), (8, 72, 4104))
)


def gathering_matmul(name: str, devices: int) -> Sequence[Sizes]:
    """A matmul whose lhs is gathered: a layer's first matmul."""
    d = devices
    return {
        "tiny": _matmuls([(256, 128, 128), (128, 256, 192)]),
        "goals": _matmuls(
            [
                (8192, 8192, 8192),
                (8192, 8192, 28672),
                (4096, 12288, 49152),
                (16384, 16384, 16384),
                (2048, 8192, 28672),
            ]
        ),
        "square": _matmuls((side, side, side) for side in SIDES),
        "llama-70b": _matmuls([*((m, 8192, 28672) for m in ROWS_OF_LLAMA), (8192, 8192, 10240)]),
        "gpt-3": _matmuls([(4096, 12288, 49152)]),
        "decode": _matmuls((m, 8192, 28672) for m in ROWS_OF_DECODING),
        "awkward": _matmuls((m * d, k, n * d) for m, k, n in AWKWARD),
        "awkward-few": _matmuls((m * d, k, n * d) for m, k, n in AWKWARD_FEW),
        "nodes": _matmuls([(8192, 8192, 8192), (8192, 8192, 28672), (16384, 16384, 16384)]),
    }.get(name, [])


def reducing_matmul(name: str, devices: int) -> Sequence[Sizes]:
    """A matmul whose products are added up: a layer's second, the long dimension contracted."""
    d = devices
    if name.startswith("awkward"):
        sizes = AWKWARD if name == "awkward" else AWKWARD_FEW
        return _matmuls((m * d, k * d, n) for m, k, n in sizes)
    if name == "llama-70b":
        return _matmuls([*((m, 28672, 8192) for m in ROWS_OF_LLAMA), (8192, 8192, 8192)])
    if name == "tiny":
        return gathering_matmul(name, devices)
    first = gathering_matmul(name, devices)
    return _matmuls((size["m"], size["n"], size["k"]) for size in first)


def collective(name: str, devices: int, *, exchanges: bool = False) -> Sequence[Sizes]:
    """A collective; `exchanges` says that all devices' operands together are meant."""
    rows = devices * (devices if exchanges else 1)
    latency = [(1 << power, 16) for power in (4, 6, 8, 10, 11)]  # 512 B to 64 KB in 16 bit types.
    awkward = AWKWARD if name == "awkward" else AWKWARD_FEW
    return {
        "tiny": _moved([(64, 32), (256, 128)]),
        "goals": _moved([*latency[::2], (4096, 8192), (8192, 8192)]),
        "square": _moved((side, side) for side in SIDES),
        "awkward": _moved(sorted({(m * rows, n) for m, _, n in awkward})),
        "awkward-few": _moved(sorted({(m * rows, n) for m, _, n in awkward})),
        "latency": _moved(latency),
        "nodes": _moved([(8192, 8192), (16384, 16384)]),
        "bandwidth": _moved((1 << power, 2048) for power in range(4, 17, 2)),  # 64 KB to 256 MB.
    }.get(name, [])


def _matmuls(sizes: Iterable[tuple[int, int, int]]) -> list[Sizes]:
    return [dict(zip("mkn", size, strict=True)) for size in sizes]


def _moved(sizes: Iterable[tuple[int, int]]) -> list[Sizes]:
    return [dict(zip("mn", size, strict=True)) for size in sizes]
