"""What a call takes, by the record of its operation and the rates of the machine.

The features of a call, an array each, one row a call:

| feature | of |
|---|---|
| `flops`, `moved` | the matmul on one device: operations; bytes of both operands and the result |
| `sent` | the collective: bytes that one device sends |
| `devices`, `reduces` | the team's size; 1 for an all-reduce, 0 for the others |
| `tflops`, `memory`, `link` | the machine: as published, TFLOP/s and GB/s |

Alpha is the time of a call that moves nothing, and grows by the same for every doubling of the
devices; beta is a share of the link's rate, one for two devices and one for more of them, whose
links carry more at once.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from stretto.benchmarks.predict.fitting import Formula, Table

FEATURES = ("flops", "moved", "sent", "devices", "reduces", "tflops", "memory", "link")
SHARPNESS = 4.0
"""How suddenly a matmul turns from one bound by memory into one bound by arithmetic."""


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Start and names of a formula's parameters, in their order."""

    names: tuple[str, ...]
    start: tuple[float, ...]


def product_us(share_of_peak: float, share_of_memory: float, table: Table) -> np.ndarray:
    """A matmul alone, without its launch."""
    arithmetic = table["flops"] / (share_of_peak * table["tflops"] * 1e6)
    memory = table["moved"] / (share_of_memory * table["memory"] * 1e3)
    return (arithmetic**SHARPNESS + memory**SHARPNESS) ** (1 / SHARPNESS)


def matmul(parameters: np.ndarray, table: Table) -> np.ndarray:
    """The launch, and the longer of arithmetic and memory."""
    launch, share_of_peak, share_of_memory = parameters
    return launch + product_us(share_of_peak, share_of_memory, table)


MATMUL = Parameters(("launch_us", "of_peak", "of_memory"), (4.0, 0.7, 0.8))


def own_matmul(share_of_memory: float) -> Formula:
    """Stretto's matmul; no shape that memory binds was timed, so its memory is as cuBLAS's."""

    def formula(parameters: np.ndarray, table: Table) -> np.ndarray:
        launch, share_of_peak = parameters
        return launch + product_us(share_of_peak, share_of_memory, table)

    return formula


OWN_MATMUL = Parameters(("launch_us", "of_peak"), (10.0, 0.7))


def few_rows(share_of_memory: float) -> Formula:
    """A kernel of few rows, which sends too little to count: alpha, and its matmul."""

    def formula(parameters: np.ndarray, table: Table) -> np.ndarray:
        alpha, growth, share_of_peak = parameters
        alphas = alpha + growth * (np.log2(table["devices"]) - 1)
        return alphas + product_us(share_of_peak, share_of_memory, table)

    return formula


FEW_ROWS = Parameters(("alpha_us", "alpha_a_doubling_us", "of_peak"), (12.0, 20.0, 0.6))


def wire_us(share_of_two: float, share_of_more: float, table: Table) -> np.ndarray:
    """The bytes that a device sends, at its share of the link."""
    share = np.where(table["devices"] > 2, share_of_more, share_of_two)
    return table["sent"] / (share * table["link"] * 1e3)


def collective(parameters: np.ndarray, table: Table) -> np.ndarray:
    """Alpha, less of an all-reduce, and the bytes."""
    alpha, growth, of_reducing, of_two, of_more = parameters
    alphas = alpha + growth * (np.log2(table["devices"]) - 1)
    alphas = alphas * np.where(table["reduces"] > 0, of_reducing, 1.0)
    return alphas + wire_us(of_two, of_more, table)


COLLECTIVE = Parameters(
    ("alpha_us", "alpha_a_doubling_us", "alpha_of_all_reduce", "of_link_2", "of_link"),
    (20.0, 3.0, 0.9, 0.55, 0.66),
)


def unfused(cublas: np.ndarray) -> Formula:
    """XLA's matmul, then its collective; `cublas` are the parameters of `matmul`."""

    def formula(parameters: np.ndarray, table: Table) -> np.ndarray:
        alpha, growth, of_two, of_more = parameters
        alphas = alpha + growth * (np.log2(table["devices"]) - 1)
        return matmul(cublas, table) + alphas + wire_us(of_two, of_more, table)

    return formula


UNFUSED = Parameters(
    ("alpha_us", "alpha_a_doubling_us", "of_link_2", "of_link"), (12.0, 4.0, 0.55, 0.66)
)


def fused(share_of_memory: float) -> Formula:
    """One kernel: the longer of its matmul and its wire, and a share of the shorter, not hidden."""

    def formula(parameters: np.ndarray, table: Table) -> np.ndarray:
        launch, share_of_peak, not_hidden, of_link = parameters
        own = product_us(share_of_peak, share_of_memory, table)
        wire = wire_us(of_link, of_link, table)
        return launch + np.maximum(own, wire) + not_hidden * np.minimum(own, wire)

    return formula


FUSED = Parameters(("launch_us", "of_peak", "not_hidden", "of_link"), (30.0, 0.72, 0.08, 0.68))
