"""The transfers to time, such that each link of a job is used once in each direction."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from stretto.benchmarks.errors import BenchmarkError
from stretto.distributed.devices import topology

WITHIN, BETWEEN = "within", "between"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Path:
    """One transfer: devices that send, each with the device that it sends to, all at once.

    Attributes:
      link: "within" or "between" nodes.
      name: in words, such as "GPU 0 to 1".
      pairs: (sender, receiver) by place in the job.
      both_ways: whether receivers send to their senders at the same time.
      everyone: whether every device sends.
    """

    link: str
    name: str
    pairs: tuple[tuple[int, int], ...]
    both_ways: bool = False
    everyone: bool = False

    @property
    def there(self) -> list[tuple[int, int]]:
        """The operand that is sent first."""
        return [*self.pairs, *(self.back if self.both_ways else [])]

    @property
    def back(self) -> list[tuple[int, int]]:
        """The operand that is sent the other way."""
        return [(receiver, sender) for sender, receiver in self.pairs]


def nodes_of(devices: Sequence) -> list[list[int]]:
    """The places of a job's devices, by node, as kernels reach them.

    Raises:
      BenchmarkError: nodes have different numbers of devices.
    """
    found: dict[object, list[int]] = {}
    for place, domain in enumerate(topology.domains_of(list(devices))):
        found.setdefault(domain, []).append(place)
    nodes = list(found.values())
    if len({len(node) for node in nodes}) > 1:
        counts = ", ".join(str(len(node)) for node in nodes)
        raise BenchmarkError(
            f"nodes of {counts} devices are not alike; start the job with as many on each."
        )
    return nodes


def paths_of(nodes: Sequence[Sequence[int]]) -> list[Path]:
    """All pairs within a node, on all nodes at once; then nodes and the ones after them.

    Raises:
      BenchmarkError: there is one device, which has no links.
    """
    found: list[Path] = []
    for one, other in itertools.combinations(range(len(nodes[0])), 2):
        pairs = tuple((node[one], node[other]) for node in nodes)
        found += _directions(WITHIN, f"GPU {one}", f"{other}", pairs)
    if len(nodes) > 1:
        last = len(nodes) if len(nodes) > 2 else 1
        for number in range(last):
            other = (number + 1) % len(nodes)
            pair = ((nodes[number][0], nodes[other][0]),)
            found += _directions(BETWEEN, f"node {number}", f"{other}", pair)
        everyone = tuple(
            (sender, receiver)
            for number, node in enumerate(nodes)
            for sender, receiver in zip(node, nodes[(number + 1) % len(nodes)], strict=True)
        )
        name = "every GPU to the next node"
        found.append(Path(link=BETWEEN, name=name, pairs=everyone, everyone=True))
    if not found:
        raise BenchmarkError(
            "one device has no links; start a job of several, such as `stretto run -n 2`."
        )
    return found


def _directions(link: str, one: str, other: str, pairs: tuple[tuple[int, int], ...]) -> list[Path]:
    """There and back in turns, and both ways at once."""
    alone = Path(link=link, name=f"{one} to {other}", pairs=pairs)
    both = Path(link=link, name=f"{one} and {other}", pairs=pairs, both_ways=True)
    return [alone, both]
