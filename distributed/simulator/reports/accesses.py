"""Findings about accesses to memory: races, and reads of what nobody has written."""

from __future__ import annotations

from typing import Any

from stretto.distributed.simulator.reports.report import Finding


def unwritten(access: Any, region: Any) -> Finding:
    """`access` reads a region that nobody has written."""
    return Finding(
        kind="uninitialised",
        key=("uninitialised", access.site, region.buffer.name),
        message=(
            f"{access.describe()} reads {region.describe()}, part of which nobody has written"
            " since it was allocated."
        ),
        sites=(access.site,),
    )


def race(first: Any, second: Any, region: Any, *, read_too_early: bool) -> Finding:
    """Two accesses without an order; the same two in the other order are the same finding.

    `read_too_early` says that the first reads what was not written yet, so that only the other
    order can be meant.
    """
    if read_too_early:
        order = (
            "Nothing orders the two, and the first reads what nobody had written before it. To come"
            f" after the second, it takes {missing_order(second, first)}."
        )
    else:
        order = (
            f"Nothing orders the two. For this order it takes {missing_order(first, second)};\n"
            f"  for the other, {missing_order(second, first)}."
        )
    ends = frozenset({(first.site, first.what), (second.site, second.what)})
    return Finding(
        kind="race",
        key=("race", ends, region.buffer.name),
        message=(
            f"race on {region.describe()}:\n  {first.describe()}\n  {second.describe()}\n  {order}"
        ),
        sites=(first.site, second.site),
    )


_BARRIER = "a barrier with orders_tensor_core=True"
_TENSOR_WAITS = {
    "tcgen05_mma": f"tcgen05_commit_arrive after it, and a wait on {_BARRIER}",
    "async_copy_smem_to_tmem": f"tcgen05_commit_arrive after it, and a wait on {_BARRIER}",
    "async_copy_scales_to_tmem": f"tcgen05_commit_arrive after it, and a wait on {_BARRIER}",
    "load from tensor memory": f"wait_load_tmem() after it, and {_BARRIER}",
    "store to tensor memory": f"commit_tmem() after it, and {_BARRIER}",
}
"""How what is under way beside a thread is waited for, by the first words of the access."""


def missing_order(first: Any, second: Any) -> str:
    """What would have ordered two accesses, `first` before `second`, in words."""
    wait = _TENSOR_WAITS.get(first.what.split("'")[0], "")
    if "copy's" in first.what:
        to_global = first.who.destination.buffer.space == "gmem"
        wait = "wait_smem_to_gmem" if to_global else "a wait on the copy's barrier"
    if first.device == second.device:
        ordered = wait or "a barrier, or a signal and a wait for it,"
        return f"{ordered} between them"
    after = f"after {wait}" if wait else "after its access, in the same warpgroup or past a barrier"
    return (
        f"a signal (system scope) that device {first.device} sends {after} and device"
        f" {second.device} waits for"
    )
