"""`--report F.html`: one page with tables, pictures, machine and method that opens offline."""

from __future__ import annotations

import html
import pathlib
import shlex

from stretto.benchmarks import files
from stretto.benchmarks.measurements.results import Measurement, Results
from stretto.benchmarks.pages import plots, terminal

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --line: #d5dae0;
        --page: #ffffff; --accent: #0072b2; --band: #f5f7f9; --warn: #fff4d6; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --soft: #9aa4ae; --line: #363d45; --page: #14171a;
          --accent: #56b4e9; --band: #1c2126; --warn: #3d3115; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1rem 4rem; background: var(--page);
       color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; } h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1.75rem 0 .25rem; overflow-wrap: anywhere; }
p, dd, li { overflow-wrap: anywhere; } .soft { color: var(--soft); }
.warn { background: var(--warn); padding: .6rem .9rem; border-radius: .4rem; font-weight: 600; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--line);
         white-space: nowrap; }
th { color: var(--soft); font-weight: 600; } th:first-child, td:first-child { text-align: left; }
tr.ours td { background: var(--band); color: var(--accent); font-weight: 600; }
figure { margin: 1rem 0 2rem; }
figure svg { width: 100%; min-width: 34rem; height: auto; color: var(--ink); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; }
dt { color: var(--soft); } dd { margin: 0; } details { margin: .25rem 0; }
code { font-size: .9em; }
@media (max-width: 40rem) { dl { grid-template-columns: 1fr; } dd { margin-bottom: .5rem; } }
"""

_METHOD = (
    "A sample is the device's time for a run of many calls inside one <code>jit</code>, each"
    " waiting for the one before, divided by their number: the interval between the completions"
    " of runs that were queued back to back.",
    "All peers of a case are visited in turns, in orders of which each peer follows each other"
    " equally often, so that the card's drift affects all of them alike. Operands are random, and"
    " rotate through several sets where one would stay in the L2.",
    "A time is the median over the samples, each the maximum over processes; p10 and p90 are the"
    " tenth and ninetieth percentile. After ± stands half of a 95% interval: Student's, of the"
    " mean over the rounds, of a ratio that of its logarithm. Two whose ratio may be 1 are called"
    " equal (=).",
    "The floor is the larger of two times: the fastest matmul of this run, alone or inside a"
    " program of the whole operation, and the bytes that a device must send over the link. Exposed"
    " is the time beyond the matmul alone; overlap is the share of the shorter part that was"
    " hidden.",
)


def write(results: Results, path: pathlib.Path) -> None:
    """Writes the page to `path`; BenchmarkError if that cannot be."""
    files.write_whole(path, page(results).encode())


def page(results: Results) -> str:
    """The page's HTML. Without matplotlib it has a note in place of pictures."""
    parts = [
        f"<h1>Stretto benchmarks</h1><p class=soft>{_text(terminal.machine_line(results))}</p>",
    ]
    if not results.measurement_of_speed:
        parts.append(f"<p class=warn>{_text(terminal.NOT_A_MEASUREMENT)}</p>")
    if worst := terminal.never_slower_line(results.measurements):
        parts.append(f"<p>{_text(worst)}.</p>")
    parts += _pictures(results)
    parts.append("<h2>Times</h2>")
    parts += [_case(measurement) for measurement in results.measurements]
    parts += _machine(results)
    parts.append("<h2>Method</h2><ul>")
    parts += [f"<li>{sentence}</li>" for sentence in _METHOD]
    parts.append("</ul>")
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>Stretto benchmarks</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _pictures(results: Results) -> list[str]:
    if not plots.available():
        return ["<p class=soft>No pictures: matplotlib was not installed.</p>"]
    return [
        f"<figure class=scroll>{picture}</figure>" for picture in plots.inline(results).values()
    ]


def _case(measurement: Measurement) -> str:
    heading = f"<h3>{_text(terminal.heading(measurement))}</h3>"
    if measurement.skipped:
        return f"{heading}<p class=soft>Skipped: {_text(measurement.skipped)}.</p>"
    collective = not measurement.has_matmul
    head = "".join(f"<th>{name}</th>" for name in ("peer", *terminal.columns(collective)))
    body = []
    for timed in sorted(measurement.timed, key=lambda timed: timed.time):
        cells = (terminal.label(timed), *terminal.cells(timed, collective))
        kind = " class=ours" if timed.role == "fused" else ""
        body.append(f"<tr{kind}>" + "".join(f"<td>{_text(cell)}</td>" for cell in cells) + "</tr>")
    floor = ""
    if measurement.floor is not None:
        floor = f"<p class=soft>{_text(terminal.floor_sentence(measurement))}.</p>"
    if equal := terminal.equal_sentence(measurement):
        floor += f"<p class=soft>{_text(equal)}.</p>"
    return (
        f"{heading}<div class=scroll><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>{floor}{_missing(measurement)}"
    )


def _missing(measurement: Measurement) -> str:
    if not measurement.missing:
        return ""
    lines = "".join(
        f"<li>{_text(terminal.peer_label(missing.peer))}: {_text(missing.reason)}</li>"
        for missing in measurement.missing
    )
    return f"<details class=soft><summary>Not timed</summary><ul>{lines}</ul></details>"


def _machine(results: Results) -> list[str]:
    machine = results.machine
    facts = {
        "devices": f"{machine.num_devices} x {machine.card}",
        "layout": f"{machine.layout}, {machine.num_hosts} host(s)",
        "driver": machine.driver or "none",
        "versions": ", ".join(f"{name} {v}" for name, v in machine.versions.items()),
        "commit": machine.commit or "unknown",
        "taken": results.start_time,
        "command": shlex.join(results.command),
    }
    pairs = "".join(f"<dt>{name}</dt><dd>{_text(value)}</dd>" for name, value in facts.items())
    return ["<h2>Machine</h2>", f"<dl>{pairs}</dl>"]


def _text(text: str) -> str:
    return html.escape(text)
