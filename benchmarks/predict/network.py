"""Times between nodes, by the machine file: alpha a hop and beta a link.

A file that says what is published is taken at `LIKELY` of it, in an interval from all of it to
`LEAST` of it, which are assumed bounds; a file that was measured is taken as it is, and `MEASURED`
bounds the committed times over two nodes of one host (`over_nodes`). No network between hosts is
among those.
"""

from __future__ import annotations

import math

from stretto.benchmarks.errors import BenchmarkError
from stretto.benchmarks.predict.model import NOTHING, Model, Predicted, total
from stretto.benchmarks.targets.machine_file import Target
from stretto.kernels.problem.work import Traffic, Work

LIKELY = 0.8
"""Share of a network's published rate that transfers reach."""
LEAST = 0.5
"""The least share that the interval allows for."""
MEASURED = 1.2
"""The largest factor between a transfer and the measured rate of its link."""
UNMEASURED = "transfers between nodes"


def crossing(sent: float, hops: float, target: Target) -> Predicted:
    """The time in which a GPU sends so many bytes to another node, while all others send too.

    Args:
      sent: bytes of one GPU.
      hops: messages that follow one another, each of which waits for the one before.
      target: the machine.

    Raises:
      BenchmarkError: the machine's file has no network.
    """
    if target.between is None:
        raise BenchmarkError(
            f"{target.name} has one node of {target.gpus_per_node} GPUs; add [between] with"
            " gb_per_s and latency_us to its file, or ask for fewer GPUs."
        )
    wire = sent * target.between.oversubscription / (target.between.gb_per_s * 1e3)
    alpha = hops * target.hop_us
    if target.origin == "published":
        times = (wire / LIKELY + alpha, wire + alpha, wire / LEAST + 2 * alpha)
    else:
        times = (wire + alpha, (wire + alpha) / MEASURED, (wire + alpha) * MEASURED)
    return Predicted(us=times[0], low=times[1], high=times[2], beyond=(UNMEASURED,))


def collective(
    model: Model, name: str, size: float, devices: int, per_node: int, target: Target
) -> Predicted:
    """A collective of XLA's over devices of which `per_node` share a node.

    Args:
      model: of calls within a node.
      name: "all_gather", "reduce_scatter", "all_reduce" or "all_to_all".
      size: bytes as `Traffic.size` has them.
      devices: the team's size; for 1 the time is 0.
      per_node: of the team, on one node; a divisor of `devices`.
      target: the machine.
    """
    if devices == 1 or size == 0:
        return NOTHING
    whole = devices if name == "all_gather" else 1
    columns = max(1, round(size / 2 / whole))
    traffic = Traffic(collective=name, shape=(1, columns), itemsize=2, devices=devices)
    inside = model.predict("collective", Work(traffic=traffic), 2, target)
    if per_node >= devices:
        return inside
    nodes = devices / per_node
    if name == "all_to_all":
        sent, hops = size * (devices - per_node) / devices, math.log2(nodes)
    else:
        sent = traffic.size * (nodes - 1) / nodes / per_node
        hops = math.log2(nodes)
        if name == "all_reduce":
            sent, hops = 2 * sent, 2 * hops
    return longer(inside, crossing(sent, hops, target))


def in_two_levels(
    model: Model, name: str, size: float, devices: int, per_node: int, target: Target
) -> Predicted:
    """A collective within nodes, and one between them of each device's share, one after the other.

    As `collective` takes its arguments; "all_to_all" has no such version.
    """
    count = devices // per_node
    parts = ("reduce_scatter", "all_gather") if name == "all_reduce" else (name,)
    within = [collective(model, part, size, per_node, per_node, target) for part in parts]
    return total([*within, collective(model, name, size / per_node, count, 1, target)])


def longer(one: Predicted, other: Predicted) -> Predicted:
    """Both at once: the longer of them."""
    return Predicted(
        us=max(one.us, other.us),
        low=max(one.low, other.low),
        high=max(one.high, other.high),
        beyond=tuple(dict.fromkeys((*one.beyond, *other.beyond))),
    )
