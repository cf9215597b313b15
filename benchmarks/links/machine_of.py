"""A machine file from measured links."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import msgspec
import numpy as np

from stretto.benchmarks.errors import BenchmarkError
from stretto.benchmarks.links.measure import Links, LinkTime
from stretto.benchmarks.links.paths import BETWEEN, WITHIN
from stretto.benchmarks.targets import machine_file
from stretto.benchmarks.targets.machine_file import Link, Network, Target

_RDMA = pathlib.Path("/sys/class/infiniband")


def target_of(found: Links, interfaces: Sequence[str] = (), within: Target | None = None) -> Target:
    """The machine that was measured; the card is as published, where a file has it.

    Args:
      found: its links.
      interfaces: names of a node's network interfaces.
      within: a machine whose links within a node are taken where every node of the job has one
        device; they must be measured ones as well.

    Raises:
      BenchmarkError: every node has one device, so that nothing was measured within one, and
        `within` is None or published.
    """
    published = machine_file.of_card(found.machine.card)
    by = f"stretto bench links, commit {found.machine.commit or 'unknown'}"
    inside, sources = _within(found, by, within)
    between = _network(found, interfaces)
    if between is not None:
        fields = ("gb_per_s", "latency_us", "oversubscription")
        sources |= {f"between.{field}": by for field in fields}
    if published is not None:
        named = published.sources.items()
        sources |= {name: where for name, where in named if name.startswith("card.")}
    return Target(
        name=f"{found.nodes} x {found.devices_per_node} {found.machine.card}",
        origin="measured",
        gpus_per_node=found.devices_per_node,
        within=inside,
        between=between,
        card=None if published is None else published.card,
        sources=sources,
    )


def _within(found: Links, by: str, other: Target | None) -> tuple[Link, dict[str, str]]:
    """The links within a node, and the sources of their figures."""
    alone = [one for one in found.links if not one.both_ways and not one.everyone]
    links = [one for one in alone if one.link == WITHIN]
    if links:
        link = Link(gb_per_s=_median(links, "gb_per_s"), latency_us=_median(links, "latency_us"))
        return link, {"within.gb_per_s": by, "within.latency_us": by}
    if other is None or other.origin != "measured":
        raise BenchmarkError(
            "--machine-out needs two devices on a node, to measure what joins them; start the job"
            " with more on each, or pass --within with a machine file that was measured on one."
        )
    named = other.sources.items()
    return other.within, {name: where for name, where in named if name.startswith("within.")}


def _network(found: Links, interfaces: Sequence[str]) -> Network | None:
    links = [one for one in found.links if one.link == BETWEEN and not one.both_ways]
    alone = [one for one in links if not one.everyone]
    if not alone:
        return None
    rate = _median(alone, "gb_per_s")
    everyone = _median([one for one in links if one.everyone], "gb_per_s")
    return Network(
        gb_per_s=rate,
        latency_us=_median(alone, "latency_us"),
        interfaces=tuple(interfaces),
        oversubscription=max(1.0, rate / everyone),
    )


def _median(links: Sequence[LinkTime], field: str) -> float:
    values = [msgspec.structs.asdict(one)[field] for one in links]
    return float(f"{np.median(values):.4g}")


def rdma_interfaces() -> tuple[str, ...]:
    """Names of this host's RDMA devices; none where it has none."""
    return tuple(sorted(path.name for path in _RDMA.glob("*"))) if _RDMA.exists() else ()
