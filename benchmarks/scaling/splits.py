"""How a model may be split over GPUs, and why it may not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from stretto.benchmarks.scaling.decoder import Decoder

MOST_AT_ONCE = 8
"""Sequences that a group computes in one pass, at most."""


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Split:
    """Sizes of the axes; their product is the number of GPUs.

    GPUs lie along "tp" first, then "ep", "cp" and "dp": neighbours share a sequence's products.
    Groups along "ep" and "dp" have sequences of their own; those along "ep" share out the experts.
    """

    tp: int
    cp: int = 1
    ep: int = 1
    dp: int = 1

    @property
    def gpus(self) -> int:
        """How many it takes."""
        return self.tp * self.cp * self.ep * self.dp

    @property
    def groups(self) -> int:
        """Groups with sequences of their own."""
        return self.ep * self.dp

    def __str__(self) -> str:
        sizes = dataclasses.asdict(self)
        return " ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "tp=1"

    def obstacle(self, decoder: Decoder, batch: int) -> str | None:
        """Why a step of `batch` sequences cannot be split so, with the way out; None if it can."""
        if decoder.kv_heads % self.tp:
            return f"kv_heads={decoder.kv_heads} is no multiple of tp={self.tp}; take a smaller tp"
        if not decoder.experts and decoder.feed_forward % self.tp:
            return (
                f"feed_forward={decoder.feed_forward} is no multiple of tp={self.tp};"
                " take a smaller tp"
            )
        if self.cp > 1 and decoder.sequence % (2 * self.cp * self.tp):
            return (
                f"sequence={decoder.sequence} is no multiple of 2 cp tp ="
                f" {2 * self.cp * self.tp}; take a smaller cp"
            )
        if decoder.experts and decoder.experts % (self.tp * self.ep):
            return (
                f"experts={decoder.experts} is no multiple of tp ep = {self.tp * self.ep};"
                " take a smaller ep"
            )
        if batch % self.groups:
            return (
                f"batch={batch} is no multiple of ep dp = {self.groups}; take a larger cp or tp,"
                " or pass another --batch"
            )
        return None


def splits_of(gpus: int, decoder: Decoder) -> Iterator[Split]:
    """Every way to write so many GPUs as tp x cp x ep x dp; ep is 1 without experts."""
    for tp in divisors(gpus):
        for cp in divisors(gpus // tp):
            rest = gpus // tp // cp
            for ep in divisors(rest) if decoder.experts else (1,):
                yield Split(tp=tp, cp=cp, ep=ep, dp=rest // ep)


def divisors(number: int) -> list[int]:
    """Of a positive number, in order."""
    return [factor for factor in range(1, number + 1) if number % factor == 0]


def members(stride: int, size: int, gpus_per_node: int) -> int:
    """Of an axis of `size` whose neighbours are `stride` GPUs apart, how many share a node."""
    room = max(1, gpus_per_node // stride)
    return max(factor for factor in divisors(size) if factor <= room)
