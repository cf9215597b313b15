"""The time of a training step: the model of calls, and what the measured steps say of the rest.

A step's calls, matmuls and attention come from the model of time and from attention's own times.
What is left (norms, rotations, activations, sums, copies, and the optimiser) is bound by memory: so
many bytes, by the arithmetic of `layer.py`, times three factors that are fitted to the measured
steps. As with calls, each configuration on each mesh is predicted by a fit that has not seen it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.predict import calls, fitting, grouped, noted
from stretto.benchmarks.predict.fitting import Table
from stretto.benchmarks.predict.model import (
    NOTHING,
    UNSEEN,
    Model,
    Predicted,
    is_unseen,
    model,
    total,
)
from stretto.benchmarks.scaling import beside, layer
from stretto.benchmarks.scaling import decoder as decoders
from stretto.benchmarks.scaling.decoder import Decoder
from stretto.benchmarks.scaling.layer import Asked, Share
from stretto.benchmarks.targets import machine_file
from stretto.benchmarks.targets.machine_file import Target
from stretto.kernels.operations import OPERATIONS
from stretto.kernels.problem.work import Work

PARTS = ("forward", "gradients", "step")
OPTIMIZER_BYTES = 38
"""Of a weight: read 4 and write 2 for the cast, read 4 for the norm of gradients, AdamW 28."""
_START = (2.0, 4.0, 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compute:
    """What a part of a step takes on one device, before the bytes that memory moves are weighed.

    Attributes:
      calls: operations along "tp", products and groups.
      alone: the same with nothing sent.
      attention: by cuDNN.
      experts: their products, and putting their rows in order; arithmetic, in its own interval.
      forward_us, backward_us, optimizer_us: bytes at the published rate of memory.
    """

    calls: Predicted = NOTHING
    alone: Predicted = NOTHING
    attention: Predicted = NOTHING
    experts: Predicted = NOTHING
    forward_us: float = 0.0
    backward_us: float = 0.0
    optimizer_us: float = 0.0

    def __add__(self, other: Compute) -> Compute:
        """One after the other."""
        return Compute(
            calls=self.calls + other.calls,
            alone=self.alone + other.alone,
            attention=self.attention + other.attention,
            experts=self.experts + other.experts,
            forward_us=self.forward_us + other.forward_us,
            backward_us=self.backward_us + other.backward_us,
            optimizer_us=self.optimizer_us + other.optimizer_us,
        )

    def times(self, factor: float) -> Compute:
        """So many of them."""
        return Compute(
            calls=self.calls.times(factor),
            alone=self.alone.times(factor),
            attention=self.attention.times(factor),
            experts=self.experts.times(factor),
            forward_us=self.forward_us * factor,
            backward_us=self.backward_us * factor,
            optimizer_us=self.optimizer_us * factor,
        )


def compute_of(
    model: Model, asked: Asked, share: Share, direction: str, how: str, target: Target
) -> Compute:
    """What a layer asks in one direction, on one device; `how` is "auto", "fused", "xla", "silent".

    Raises:
      UnavailableError: the sizes cannot be cut into the devices' shares.
    """
    made = [
        _call(model, name, tuple(sizes.items()), share.tp, how, target)
        for name, sizes in asked.calls
    ]
    local = total(_product(model, product, target) for product in asked.products)
    experts = total(
        grouped.grouped_matmul(model, Work(product=(m, k, n), matrices=groups), target)
        for m, k, n, groups in asked.grouped
    )
    experts += beside.sorting_us(asked.sorted_bytes, target)
    memory = machine_file.card_of(target, target.name).memory_gb_per_s * 1e3
    moved = asked.elementwise_bytes / memory
    return Compute(
        calls=total(time for time, _ in made) + local,
        alone=total(alone for _, alone in made) + local,
        attention=beside.attention_us(asked.attention_flops, direction, target),
        experts=experts,
        forward_us=moved if direction == "forward" else 0.0,
        backward_us=moved if direction == "backward" else 0.0,
    )


@functools.lru_cache(maxsize=1 << 12)
def _call(
    model: Model,
    name: str,
    sizes: tuple[tuple[str, int], ...],
    devices: int,
    how: str,
    target: Target,
) -> tuple[Predicted, Predicted]:
    """The time of an operation along "tp", and of its matmul alone."""
    case = Case(operation=OPERATIONS[name], sizes=dict(sizes), dtype="bfloat16", devices=devices)
    implementation = "xla" if how == "silent" else how
    found = calls.call_time(model, case, target, implementation)
    return (found.alone if how == "silent" else found.time), found.alone


def _product(model: Model, product: tuple[int, int, int], target: Target) -> Predicted:
    return model.predict("matmul", Work(product=product), layer.ITEMSIZE, target)


@functools.lru_cache(maxsize=1 << 12)
def part_of_step(
    model: Model, decoder: Decoder, share: Share, part: str, how: str, target: Target
) -> Compute:
    """Every layer of a part of a step, in one pass over a device's rows; it sends along "tp"."""
    asked = layer.forward(decoder, share)
    found = compute_of(model, asked, share, "forward", how, target)
    if part != "forward":
        back = layer.backward(decoder, share)
        found += compute_of(model, back, share, "backward", how, target)
    found = found.times(decoder.layers)
    if part == "step":
        found += optimizer(decoder, share, target)
    return found


def optimizer(decoder: Decoder, share: Share, target: Target, shares: int = 1) -> Compute:
    """AdamW on a device's weights, or on a part of them where `shares` devices divide its state."""
    memory = machine_file.card_of(target, target.name).memory_gb_per_s * 1e3
    own = device_weights(decoder, share) / shares
    return Compute(optimizer_us=own * OPTIMIZER_BYTES / memory)


def device_weights(decoder: Decoder, share: Share) -> float:
    """Elements of the weights that a device holds, where nothing but "tp" and "ep" divides them."""
    dense = decoder.attention_weights / share.tp
    rest = decoder.feed_forward_weights / share.tp
    if decoder.experts:
        rest /= share.ep
    return decoder.layers * (dense + rest) + decoder.end_weights


def _features(found: Compute) -> tuple[float, ...]:
    base = found.calls.us + found.attention.us + found.experts.us
    return base, found.forward_us, found.backward_us, found.optimizer_us


_FEATURES = ("base", "forward", "backward", "optimizer")


def _formula(parameters: np.ndarray, table: Table) -> np.ndarray:
    forward, backward, optimizer = parameters
    moved = forward * table["forward"] + backward * table["backward"]
    return table["base"] + moved + optimizer * table["optimizer"]


@dataclasses.dataclass(frozen=True)
class StepLeftOut:
    """A measured part of a step beside its prediction by a fit that has not seen the case."""

    time: noted.StepTime
    us: float

    @property
    def error(self) -> float:
        """Logarithm of predicted over measured."""
        return math.log(self.us / (1e3 * self.time.ms))


@dataclasses.dataclass(frozen=True, eq=False)
class StepModel:
    """The three factors, and the errors that they make.

    Attributes:
      calls: the model of calls.
      factors: of bytes moved forward, backward, and by the optimiser.
      left_out: every measured part of a step, predicted without its configuration and mesh.
    """

    calls: Model
    factors: tuple[float, ...]
    left_out: tuple[StepLeftOut, ...]

    def time(self, found: Compute, target: Target) -> Predicted:
        """The time of a part of a step on one device, by the errors of the measured steps."""
        own = self.us_of(found) - found.experts.us
        width = math.exp(self.error_of())
        beyond = found.calls.beyond
        other = machine_file.card_of(target, target.name).name not in measured_cards()
        if other:
            beyond = (*beyond, "steps on such cards")
        if other or is_unseen(beyond):
            width *= UNSEEN
        return Predicted(us=own, low=own / width, high=own * width, beyond=beyond) + found.experts

    def us_of(self, found: Compute) -> float:
        """The time alone."""
        return float(_us(self.factors, [_features(found)])[0])

    def error_of(self, without: str = "") -> float:
        """The logarithm that 95% of the errors stay within, one case not counted."""
        errors = [one.error for one in self.left_out if one.time.case != without]
        return fitting.quantile(np.asarray(errors), 0.95)


def _us(factors: Sequence[float], rows: Sequence[tuple[float, ...]]) -> np.ndarray:
    return _formula(np.asarray(factors), _table(rows))


def _table(rows: Sequence[tuple[float, ...]]) -> dict[str, np.ndarray]:
    return dict(zip(_FEATURES, np.asarray(rows, dtype=np.float64).T, strict=True))


def measured_cards() -> set[str]:
    """The cards that steps were measured on."""
    times = noted.times()
    return {times.sources[one.source].card for one in times.steps}


def _noted_compute(calls: Model, one: noted.StepTime) -> Compute:
    decoder = decoders.read(one.model)
    share = Share(rows=one.batch * one.sequence // one.dp, sequence=one.sequence, tp=one.tp)
    target = noted.target_of(one.source)
    how = "auto" if one.how == "fused" else one.how
    return part_of_step(calls, decoder, share, one.part, how, target)


@functools.cache
def step_model() -> StepModel:
    """The model of steps, fitted to the measured ones."""
    times, found = noted.times().steps, model()
    rows = [_features(_noted_compute(found, one)) for one in times]

    def fitted(without: str) -> tuple[float, ...]:
        kept = [place for place, one in enumerate(times) if one.case != without]
        us = np.asarray([1e3 * times[place].ms for place in kept])
        factors = fitting.fit(_formula, _START, _table([rows[place] for place in kept]), us)
        return tuple(map(float, factors))

    left_out: list[StepLeftOut] = []
    for case in dict.fromkeys(one.case for one in times):
        factors = fitted(case)
        left_out += [
            StepLeftOut(one, float(_us(factors, [row])[0]))
            for one, row in zip(times, rows, strict=True)
            if one.case == case
        ]
    return StepModel(found, fitted(""), tuple(left_out))
