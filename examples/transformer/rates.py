"""What the benchmark says of times: rates, ratios, and lines of a table."""

from __future__ import annotations

import dataclasses

import config
import numpy as np

from stretto.benchmarks.measurements.spread import median_ratio, spread

PEAK_TFLOPS = 989.0  # of an H100, 16 bit, without sparsity


def flops_per_device(sizes: config.Sizes, part: str, batch: int, devices: int) -> float:
    """Floating-point operations that the model asks for; what remat computes again is not counted.

    Two for every weight of a matrix and byte, of experts those that it goes to, and four for every
    pair of bytes that attention compares, half of which are masked; a backward pass is twice a
    forward pass.
    """
    hidden, head_dim = sizes.hidden, sizes.head_dim
    columns = (sizes.heads + 2 * sizes.kv_heads) * head_dim + hidden
    columns += 3 * sizes.feed_forward * max(1, sizes.top_k) + sizes.experts
    layers = sizes.layers * (2 * hidden * columns + 2 * sizes.sequence * hidden)
    ends = 4 * config.VOCABULARY * hidden
    forward = batch * sizes.sequence * (layers + ends)
    return forward * (1 if part == "forward" else 3) / devices


def describe_times(
    sizes: config.Sizes, batch: int, devices: int, part: str, times: dict[str, list[float]]
) -> list[dict]:
    """One record for each backend of a part; ratios and differences are of the same round."""
    flops = flops_per_device(sizes, part, batch, devices)
    records = []
    for backend, samples in times.items():
        ms = spread(samples)
        record = {
            "part": part,
            "backend": backend,
            "ms": dataclasses.asdict(ms),
            "rounds": samples,
            "tflops_per_device": flops / ms.median / 1e9,
            "share_of_peak": flops / ms.median / 1e9 / PEAK_TFLOPS,
            "tokens_per_s": batch * sizes.sequence / ms.median * 1e3,
        }
        if "xla" in times:
            record["speedup_over_xla"] = median_ratio(times["xla"], samples)
        if "silent" in times:
            record["exposed_ms"] = float(np.median(np.subtract(samples, times["silent"])))
        records.append(record)
    return records


HEADER = (
    "part       backend   ms median        10% to       90%   TFLOP/s    peak  x XLA's"
    "   exposed       GB"
)


def show(record: dict) -> str:
    """A record as a line of the table."""
    ms = record["ms"]
    line = f"{record['part']:9}  {record['backend']:7}  {ms['median']:9.2f}"
    line += f"  {ms['p10']:9.2f} to {ms['p90']:9.2f}  {record['tflops_per_device']:7.1f}"
    line += f"  {record['share_of_peak']:6.1%}  {record.get('speedup_over_xla', 1.0):6.3f}"
    return line + f"  {record.get('exposed_ms', np.nan):9.2f}  {record['needed_gb']:7.2f}"
