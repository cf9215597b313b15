"""Plans as tables in the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from stretto.benchmarks.pages.terminal import number, percent
from stretto.benchmarks.scaling.planned import (
    CallsPlan,
    Entry,
    ForGpus,
    Plan,
    PlannedCall,
    ScalingRow,
)

SHOWN_LOSERS = 6
NOTHING = "-"


def print_plan(console: Console, plan: Plan) -> None:
    """The text of a plan."""
    console.print(heading(plan), highlight=False)
    for one in plan.splits:
        print_splits(console, plan, one)
    batch = plan.splits[0].batch if plan.splits else 0
    print_scaling(console, f"strong scaling, {batch} sequences a step", plan.strong)
    print_scaling(console, "weak scaling, one sequence a GPU", plan.weak)
    for line in beyond_lines(plan):
        console.print(line, highlight=False)


def heading(plan: Plan) -> str:
    """The model and the machine in one line."""
    origin = "links as published" if plan.origin == "published" else "links as measured"
    return (
        f"{plan.model}: {plan.weights / 1e9:.1f} billion weights, sequences of {plan.sequence};"
        f" {plan.machine} ({plan.card}, {plan.card_gb:.0f} GB), {origin}"
    )


def print_splits(console: Console, plan: Plan, one: ForGpus) -> None:
    """The best splits over a number of GPUs, and why the others lose."""
    title = f"{one.gpus} GPUs, {one.batch} sequences a step"
    if not one.best:
        console.print(f"\n{title}: {none_fits(plan, one)}", highlight=False)
    else:
        table = _table(title)
        for column in ("split", "how"):
            table.add_column(column)
        for column in ("step, s", "interval", "exposed", "GB", "TFLOP/s a GPU"):
            table.add_column(column, justify="right", no_wrap=True)
        for entry in one.best:
            table.add_row(*entry_cells(entry))
        console.print(table)
    for line in loser_lines(one):
        console.print(f"  {line}", highlight=False)


def none_fits(plan: Plan, one: ForGpus) -> str:
    """States that no split fits, and what would fit."""
    if one.least_gb == float("inf"):
        return "no split is possible; pass another --batch or number of GPUs."
    return (
        f"no split fits; the least needs {one.least_gb:.0f} GB, and of a card's"
        f" {plan.card_gb:.0f} a step may take {plan.free_gb:.0f}. Take more GPUs, or"
        " cards with more memory."
    )


def entry_cells(entry: Entry) -> list[str]:
    """A split as cells: split, how, step, interval, exposed, memory, rate."""
    return [
        entry.split,
        entry.how,
        number(entry.step_s),
        f"{number(entry.low_s)} to {number(entry.high_s)}",
        percent(entry.exposed_s / entry.step_s),
        f"{entry.memory_gb:.0f}",
        f"{entry.tflops_per_gpu:.0f}",
    ]


def loser_lines(one: ForGpus) -> list[str]:
    """Why other splits lose: the nearest ones each, then how many cannot be, by reason."""
    slower = [loser for loser in one.losers if "slower" in loser.why]
    lines = [f"{loser.split}: {loser.why}" for loser in slower[:SHOWN_LOSERS]]
    if len(slower) > SHOWN_LOSERS:
        last = slower[-1]
        lines.append(f"{len(slower) - SHOWN_LOSERS} more, down to {last.split}: {last.why}")
    if one.too_large:
        lines.append(
            f"{one.too_large} splits do not fit in memory: {_examples(one, 'does not fit')}"
        )
    others = [loser for loser in one.losers if loser not in slower]
    reasons = Counter(loser.why for loser in others if "does not fit" not in loser.why)
    lines += [f"{count} impossible: {why}" for why, count in reasons.most_common(SHOWN_LOSERS)]
    return lines


def _examples(one: ForGpus, reason: str) -> str:
    found = [loser for loser in one.losers if reason in loser.why]
    return "; ".join(f"{loser.split} {loser.why.split(': it ', 1)[1]}" for loser in found[:2])


def print_scaling(console: Console, title: str, found: Sequence[ScalingRow]) -> None:
    """The best split of every number of GPUs."""
    table = _table(title)
    for column in ("GPUs", "sequences", "step, s", "interval", "tokens/s", "efficiency", "exposed"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("split")
    for one in found:
        table.add_row(*scaling_cells(one))
    console.print(table)


def scaling_cells(one: ScalingRow) -> list[str]:
    """A row: GPUs, sequences, step, interval, tokens, efficiency, exposed, split."""
    if one.best is None:
        return [str(one.gpus), str(one.batch), *[NOTHING] * 5, "none fits"]
    best = one.best
    return [
        str(one.gpus),
        str(one.batch),
        number(best.step_s),
        f"{number(best.low_s)} to {number(best.high_s)}",
        f"{best.tokens_per_s:,.0f}",
        percent(one.efficiency),
        percent(best.exposed_s / best.step_s),
        best.split,
    ]


def beyond_lines(plan: Plan) -> list[str]:
    """Where the best splits go beyond the measurements."""
    words: dict[str, None] = {}
    best = [entry for one in plan.splits for entry in one.best[:1]]
    for entry in best:
        words.update(dict.fromkeys(entry.beyond))
    if not best:
        return []
    if not words:
        return ["All of it lies within what was measured."]
    return [f"Beyond what was measured: {'; '.join(words)}."]


def print_calls(console: Console, plan: CallsPlan) -> None:
    """The calls of a file."""
    origin = "links as published" if plan.origin == "published" else "links as measured"
    table = _table(f"{plan.machine}, {origin}, in us")
    for column in ("operation", "shape"):
        table.add_column(column)
    for column in ("GPUs", "times", "us", "interval", "exposed"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("by")
    for one in plan.calls:
        table.add_row(*call_cells(one))
    console.print(table)
    words = dict.fromkeys(word for one in plan.calls for word in one.beyond)
    if words:
        console.print(f"Beyond what was measured: {'; '.join(words)}.", highlight=False)


def call_cells(one: PlannedCall) -> list[str]:
    """A row: operation, shape, GPUs, times, us, interval, exposed, what serves it."""
    named = [one.operation, one.shape, str(one.gpus), str(one.times)]
    if one.skipped:
        return [*named, NOTHING, NOTHING, NOTHING, one.skipped]
    interval = f"{number(one.low_us)} to {number(one.high_us)}"
    return [*named, number(one.us), interval, number(one.exposed_us), one.way]


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
