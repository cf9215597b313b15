"""The time and the memory of a step in one split, and their parts."""

from __future__ import annotations

import dataclasses
import itertools

from stretto.benchmarks.predict import network
from stretto.benchmarks.predict.model import NOTHING, Predicted, total
from stretto.benchmarks.scaling import layer, memory, steps
from stretto.benchmarks.scaling.decoder import Decoder
from stretto.benchmarks.scaling.layer import Share
from stretto.benchmarks.scaling.memory import Memory
from stretto.benchmarks.scaling.splits import MOST_AT_ONCE, Split, members
from stretto.benchmarks.scaling.steps import StepModel
from stretto.benchmarks.targets import machine_file
from stretto.benchmarks.targets.machine_file import Target

REMATS = ("elementwise", "layer")
ROUTING_US = 40.0
"""The tables of a mixture, for a layer and direction: an estimate."""
UNMEASURED = 1.5
"""How far a time may be off that is arithmetic alone, as a factor on either side; our guess."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class How:
    """How a split is computed.

    Attributes:
      at_once: sequences of a group in one pass; gradients of several passes are added up.
      remat: what the backward pass computes again, as in `examples/transformer`.
      shared: whether weights, moments and gradients are split over the groups.
    """

    at_once: int
    remat: str
    shared: bool

    def __str__(self) -> str:
        again = ", remat" if self.remat == "layer" else ""
        return f"{self.at_once} at once{again}{', shared state' if self.shared else ''}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluated:
    """A step in one split.

    Attributes:
      split, how: the evaluated way.
      time: of the step.
      memory: on each device.
      parts: microseconds by use; together they are the time.
      exposed_us: of which nothing but communication is done.
    """

    split: Split
    how: How
    time: Predicted
    memory: Memory
    parts: dict[str, float]
    exposed_us: float


def ways(decoder: Decoder, split: Split, batch: int) -> list[How]:
    """How a split may be computed."""
    sequences = batch // split.groups
    counts = [n for n in range(1, MOST_AT_ONCE + 1) if sequences % n == 0 and n & (n - 1) == 0]
    shared = (False, True) if split.cp * split.groups > 1 else (False,)
    return [
        How(at_once=at_once, remat=remat, shared=share)
        for at_once, remat, share in itertools.product(counts, REMATS, shared)
        if at_once * decoder.sequence // split.cp % split.tp == 0
    ]


def share_of(decoder: Decoder, split: Split, how: How) -> Share:
    """A device's part of a pass."""
    rows = how.at_once * decoder.sequence // split.cp
    return Share(rows=rows, sequence=decoder.sequence, tp=split.tp, cp=split.cp, ep=split.ep)


def memory_of(decoder: Decoder, split: Split, how: How) -> Memory:
    """The memory of a device, by its use."""
    shares = _state_shares(decoder, split) if how.shared else 1.0
    share = share_of(decoder, split, how)
    return memory.memory_of(decoder, share, remat=how.remat, state_shares=shares)


def _state_shares(decoder: Decoder, split: Split) -> float:
    """Over how many devices a weight is split, as a mean over the weights."""
    dense, experts = _weights(decoder, split)
    copies = split.cp * split.dp
    parts = dense / (copies * split.ep) + experts / copies
    return (dense + experts) / parts


def evaluate(
    model: StepModel, decoder: Decoder, split: Split, how: How, batch: int, target: Target
) -> Evaluated:
    """The step's time and memory.

    Raises:
      UnavailableError: a projection cannot be cut into the devices' shares.
      BenchmarkError: the machine has no card, or no network where one is needed.
    """
    share = share_of(decoder, split, how)
    passes = batch // split.groups // how.at_once
    once = steps.part_of_step(model.calls, decoder, share, "gradients", "auto", target)
    if how.remat == "layer":
        once += steps.part_of_step(model.calls, decoder, share, "forward", "auto", target)
    shares = _state_shares(decoder, split) if how.shared else 1.0
    all_of_it = once.times(passes) + steps.optimizer(decoder, share, target, max(1, round(shares)))
    on_device = model.time(all_of_it, target)
    sent = _sent(model, decoder, split, how, share, passes, target)
    tensor_us = max(0.0, all_of_it.calls.us - all_of_it.alone.us)
    parts = {
        "products": all_of_it.calls.us - tensor_us,
        "attention": all_of_it.attention.us,
        "experts": all_of_it.experts.us,
        "memory": on_device.us - all_of_it.calls.us - all_of_it.attention.us - all_of_it.experts.us,
        "tp": tensor_us,
        **{name: time.us for name, time in sent.items()},
    }
    beyond = [f"{passes} passes a step"] if passes > 1 else []
    beyond += ["experts"] if decoder.experts else []
    beyond += ["a shared state"] if how.shared else []
    time = on_device + total(sent.values())
    return Evaluated(
        split=split,
        how=how,
        time=dataclasses.replace(time, beyond=tuple(dict.fromkeys((*beyond, *time.beyond)))),
        memory=memory_of(decoder, split, how),
        parts={name: us for name, us in parts.items() if us},
        exposed_us=tensor_us + sum(time.us for time in sent.values()),
    )


def _sent(
    model: StepModel,
    decoder: Decoder,
    split: Split,
    how: How,
    share: Share,
    passes: int,
    target: Target,
) -> dict[str, Predicted]:
    """Traffic besides the projections' rows, by axis; it is not overlapped."""
    calls, per_node = model.calls, target.gpus_per_node
    directions = [layer.forward(decoder, share), layer.backward(decoder, share)]
    directions += directions[:1] if how.remat == "layer" else []

    def over(name: str, size: float, stride: int, devices: int) -> Predicted:
        inside = members(stride, devices, per_node)
        return network.collective(calls, name, size, devices, inside, target)

    keys = exchange = NOTHING
    for asked in directions:
        for name, size in asked.gathered.items():
            keys += over(name, size, split.tp * split.ep, split.cp)
        rows = over("all_to_all", asked.exchanged, 1, split.tp * split.ep)
        exchange += rows.times(asked.exchanges)
        if asked.exchanges:
            exchange += Predicted(us=ROUTING_US, low=ROUTING_US, high=ROUTING_US)
    rounds = decoder.layers * passes
    found = {
        "cp": _arithmetic(keys.times(rounds), "attention over split tokens"),
        "ep": _arithmetic(exchange.times(rounds), "experts"),
    }
    dense, experts = _weights(decoder, split)
    copies = split.cp * split.dp
    if how.shared:
        state = NOTHING
        for weights, stride, devices in (
            (dense, split.tp, copies * split.ep),
            (experts, split.tp * split.ep, copies),
        ):
            gathers = 2 if how.remat == "elementwise" else 3
            state += over("all_gather", 2 * weights, stride, devices).times(gathers * passes)
            state += over("reduce_scatter", 4 * weights, stride, devices).times(passes)
        found["state"] = _arithmetic(state, "a shared state")
    else:
        found["gradients"] = over("all_reduce", 4 * dense, split.tp, copies * split.ep)
        found["gradients"] += over("all_reduce", 4 * experts, split.tp * split.ep, copies)
    return {name: time for name, time in found.items() if time.us}


def _weights(decoder: Decoder, split: Split) -> tuple[float, float]:
    """Elements of a device's weights: those that groups along "ep" have alike, and its experts."""
    share = Share(rows=0, sequence=decoder.sequence, tp=split.tp, ep=split.ep)
    everything = steps.device_weights(decoder, share)
    if not decoder.experts:
        return everything, 0.0
    experts = decoder.layers * decoder.feed_forward_weights / split.tp / split.ep
    return everything - experts, experts


def _arithmetic(time: Predicted, what: str) -> Predicted:
    """A time that no measurement stands for, in a wider interval."""
    if not time.us:
        return time
    wider = time.within(UNMEASURED)
    return dataclasses.replace(wider, beyond=tuple(dict.fromkeys((what, *wider.beyond))))


def best_way(
    model: StepModel, decoder: Decoder, split: Split, batch: int, target: Target
) -> tuple[Evaluated | None, float]:
    """The fastest way to compute a split that fits, and the least memory in GB of any way.

    None where no way fits.
    """
    card = machine_file.card_of(target, target.name)
    needs = {how: memory_of(decoder, split, how) for how in ways(decoder, split, batch)}
    least = min((need.gb for need in needs.values()), default=float("inf"))
    fitting = [how for how, need in needs.items() if need.fits(card)]
    found = [evaluate(model, decoder, split, how, batch, target) for how in fitting]
    return min(found, key=lambda one: one.time.us, default=None), least
