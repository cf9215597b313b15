"""Plans: the best splits over each number of GPUs, why others lose, and how a model scales."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.benchmarks.errors import UnavailableError
from stretto.benchmarks.scaling import memory, steps
from stretto.benchmarks.scaling.decoder import Decoder
from stretto.benchmarks.scaling.evaluate import Evaluated, best_way
from stretto.benchmarks.scaling.planned import (
    SCHEMA,
    Entry,
    ForGpus,
    Loser,
    Plan,
    ScalingRow,
)
from stretto.benchmarks.scaling.splits import Split, splits_of
from stretto.benchmarks.scaling.steps import StepModel
from stretto.benchmarks.targets import machine_file
from stretto.benchmarks.targets.machine_file import Target

BEST = 5
_PART_WORDS = {
    "products": "its products take",
    "attention": "attention takes",
    "experts": "the experts' products take",
    "memory": "norms, copies and the optimiser take",
    "tp": "rows along tp that are not hidden take",
    "cp": "keys and values along cp take",
    "ep": "sending experts' rows takes",
    "gradients": "the sum of gradients takes",
    "state": "gathering the shared state takes",
}


def plan(decoder: Decoder, counts: Sequence[int], target: Target, batch: int) -> Plan:
    """The plan of a model over several numbers of GPUs.

    Args:
      decoder: the model.
      counts: numbers of GPUs.
      target: the machine.
      batch: sequences of a step for strong scaling; of weak scaling it is one for each GPU.

    Raises:
      BenchmarkError: the machine's file has no card, or no network where one is needed.
    """
    card = machine_file.card_of(target, target.name)
    model = steps.step_model()
    strong = [over(model, decoder, count, batch, target) for count in counts]
    weak = [over(model, decoder, count, count, target) for count in counts]
    return Plan(
        schema=SCHEMA,
        model=decoder.name,
        weights=decoder.weights,
        sequence=decoder.sequence,
        machine=target.name,
        origin=target.origin,
        card=card.name,
        card_gb=card.memory_gb,
        free_gb=memory.USABLE * card.memory_gb,
        splits=strong,
        strong=scaling_rows(strong),
        weak=scaling_rows(weak),
    )


def over(model: StepModel, decoder: Decoder, gpus: int, batch: int, target: Target) -> ForGpus:
    """Every split over this number of GPUs."""
    card = machine_file.card_of(target, target.name)
    fitting: list[Evaluated] = []
    losers: list[Loser] = []
    free = memory.USABLE * card.memory_gb
    least, too_large, impossible = float("inf"), 0, 0
    for split in splits_of(gpus, decoder):
        obstacle = split.obstacle(decoder, batch)
        if obstacle is not None:
            impossible += 1
            losers.append(Loser(split=str(split), why=obstacle))
            continue
        try:
            found, needed = best_way(model, decoder, split, batch, target)
        except UnavailableError as error:
            impossible += 1
            losers.append(Loser(split=str(split), why=f"{error}; take another tp"))
            continue
        least = min(least, needed)
        if found is None:
            too_large += 1
            why = f"does not fit: it needs {needed:.0f} GB of {free:.0f}"
            losers.append(Loser(split=str(split), why=why))
        else:
            fitting.append(found)
    fitting.sort(key=lambda one: one.time.us)
    losers = [_slower(one, fitting[0]) for one in fitting[BEST:]] + losers
    return ForGpus(
        gpus=gpus,
        batch=batch,
        best=[entry_of(one, decoder, batch) for one in fitting[:BEST]],
        losers=losers,
        fitting=len(fitting),
        too_large=too_large,
        impossible=impossible,
        least_gb=least,
    )


def _slower(one: Evaluated, best: Evaluated) -> Loser:
    """The reason why a split is slower than the best: the part that grew most."""
    grown = {name: us - best.parts.get(name, 0.0) for name, us in one.parts.items()}
    name = max(grown, key=lambda part: grown[part])
    more = 100 * (one.time.us / best.time.us - 1)
    seconds = grown[name] / 1e6
    took = f"{seconds:.0f}" if seconds >= 100 else f"{seconds:.2g}"
    why = f"{more:.0f}% slower: {_PART_WORDS[name]} {took} s more"
    return Loser(split=str(one.split), why=why)


def entry_of(one: Evaluated, decoder: Decoder, batch: int) -> Entry:
    """A split as a plan shows it."""
    split: Split = one.split
    tokens = batch * decoder.sequence
    seconds = one.time.us / 1e6
    return Entry(
        split=str(split),
        how=str(one.how),
        tp=split.tp,
        cp=split.cp,
        ep=split.ep,
        dp=split.dp,
        step_s=seconds,
        low_s=one.time.low / 1e6,
        high_s=one.time.high / 1e6,
        exposed_s=one.exposed_us / 1e6,
        memory_gb=one.memory.gb,
        tokens_per_s=tokens / seconds,
        tflops_per_gpu=flops_of_step(decoder, batch) / split.gpus / seconds / 1e12,
        parts_s={name: us / 1e6 for name, us in one.parts.items()},
        beyond=list(one.time.beyond),
    )


def flops_of_step(decoder: Decoder, batch: int) -> float:
    """Operations that a step asks for: three forward passes', and of experts the chosen."""
    chosen = decoder.experts_a_token / decoder.experts if decoder.experts else 1.0
    weights = decoder.attention_weights + decoder.feed_forward_weights * chosen
    attention = decoder.sequence * decoder.attention_width
    a_token = 2 * decoder.layers * (weights + attention) + decoder.end_weights
    return 3.0 * batch * decoder.sequence * a_token


def scaling_rows(found: Sequence[ForGpus]) -> list[ScalingRow]:
    """Efficiencies of the best splits, beside the first that fits."""
    rows, first = [], None
    for one in found:
        best = one.best[0] if one.best else None
        rate = best.tokens_per_s / one.gpus if best is not None else None
        first = first or rate
        rows.append(
            ScalingRow(
                gpus=one.gpus,
                batch=one.batch,
                best=best,
                efficiency=rate / first if rate is not None and first else None,
            )
        )
    return rows
