"""A rough estimate of a sweep's time, before it runs, to fit it into a budget."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.benchmarks.cases import floors
from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.peers.peer import FUSED, Peer, applies
from stretto.benchmarks.timing.measure import Settings
from stretto.benchmarks.timing.timers import SAMPLES_PER_VISIT, TARGET_RUN_US

# Of a machine with H100s and many cores, in seconds.
START_S = 15.0
TRACE_FUSED_MATMUL_S = 1.0
TRACE_FUSED_COLLECTIVE_S = 0.25
COMPILE_S = 0.3
WARM_UP_S = 0.15


def seconds(case: Case, peers: Sequence[Peer], settings: Settings) -> float:
    """Seconds that `case` is expected to take on GPUs, with its share of the common work."""
    peers = [peer for peer in peers if applies(peer, case)]
    call_us = floors.expected_us(case)
    run_s = max(TARGET_RUN_US, 2 * call_us) * 1e-6
    visits = -(-settings.repeats // SAMPLES_PER_VISIT)
    timed_s = (settings.repeats + visits) * run_s + visits * settings.rest_s
    ours = sum(peer.role == FUSED for peer in peers)
    fused_s = TRACE_FUSED_MATMUL_S if case.work.flops else TRACE_FUSED_COLLECTIVE_S
    trace_s = fused_s * (ours > 0) * case.needs_kernel
    trace_s += sum(peer.trace_s for peer in peers if peer.has(case.operation))
    # `auto` is always the same program as another peer.
    programs = len(peers) - (len(peers) > 1 and any(peer.name == "auto" for peer in peers))
    return trace_s + COMPILE_S + programs * (WARM_UP_S + timed_s)


def words(total_s: float, cases: int) -> str:
    """How many cases, and how long they will take, in words."""
    minutes, rest = divmod(round(total_s), 60)
    duration = f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
    return f"{cases} case{'s' * (cases != 1)}, about {duration} on H100s"
