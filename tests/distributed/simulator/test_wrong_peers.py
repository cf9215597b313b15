"""Reports of signals and copies that go to a wrong device: they say which, and where they went.

The kernel sends a row both ways round a ring of four devices. Each bug is one mistake in it, and
each report must name it, and not a wait that is there.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from stretto.distributed import copies, kernel
from stretto.distributed.semaphores import SemaphoreArray
from stretto.distributed.simulator import SimulationError, simulate
from stretto.distributed.simulator.reports.report import Report
from stretto.distributed.team import Team

DEVICES = 4
ROW = jax.ShapeDtypeStruct((1, 128), jnp.float32)


def both_ways(x, bug):
    """The sum of both neighbours' rows."""
    team = Team.along("x")

    def body(x_ref, out_ref, above_ref, below_ref, *, received, row, loaded):
        inboxes, peers = (above_ref, below_ref), (team.neighbour(1), team.neighbour(-1))
        plgpu.copy_gmem_to_smem(x_ref, row, loaded)
        plgpu.barrier_wait(loaded)
        for way in range(2):
            peer = {"copy past": team.neighbour(2), "all copies to 0": 0}.get(bug, peers[way])
            peer = peers[1] if bug == "copies one way" else peer
            inbox = inboxes[0] if bug == "one inbox" else inboxes[way]
            plgpu.copy_smem_to_gmem(row, copies.remote(inbox, team, peer))
        plgpu.wait_smem_to_gmem(0)
        for way in range(2):
            index = 1 - way if bug == "wrong index" else way
            index = 0 if bug == "one index" else index
            to = {"signal past": team.neighbour(2), "all signals to 0": 0}.get(bug, peers[way])
            received.at[index].signal(peer_id=None if bug == "signals to itself" else to)
        received.at[0].wait(0 if bug == "no count" else 1)
        total = above_ref[...]
        if bug == "late wait":
            total += below_ref[...]
        if bug != "no wait":
            received.at[1].wait()
        if bug != "late wait":
            total += below_ref[...]
        out_ref[...] = total

    return kernel.launch(
        body, x, name="both_ways", team=team, out_type=[ROW], symmetric=[ROW, ROW], num_blocks=1,
        semaphore_arrays=dict(received=SemaphoreArray((2,))),
        scratch=dict(row=plgpu.SMEM((1, 128), jnp.float32), loaded=plgpu.Barrier()),
    )[0]  # fmt: skip


def report_of(fun, columns=128) -> Report:
    """The report of a simulation of `fun` on four devices."""
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("x",))
    mapped = jax.jit(jax.shard_map(fun, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
    x = np.repeat(np.arange(DEVICES, dtype=np.float32), columns).reshape(DEVICES, columns)
    try:
        with simulate(seed=0, on_finding="record") as report:
            jax.block_until_ready(mapped(x))
    except SimulationError as error:
        assert error.report is not None
        return error.report
    return report


def test_the_correct_kernel_has_nothing_to_report():
    assert report_of(lambda x: both_ways(x, None)).ok


TOLD = {
    "signal past": r"which device \d signals\. Device \d signals .*Is the peer of the signal",
    "copy past": r"which device \d signals\. Device \d signals .*or the peer of the copy",
    "signals to itself": r"device (\d) .* Device (?!\1)(\d) signals received.\d. of device \2",
    "wrong index": r"Device \d signals .*received\[1\] of device \d.*its index",
    "late wait": r"received\[1\] of device \d \(which waits for it only later\).*too late",
    "no wait": r"signals received\[1\] of device \d, .*and no wait asks for it\. Is a wait missing",
    "no count": r"waited for 0 of the 1 signals of received\[0\], .*Is the count too low",
    "all copies to 0": r"of devices 1, 2 and 3.*of device 0 by devices 0, 1, 2 and 3, at .*Is",
    "one inbox": r"Nobody has written that place of any device\.",
    "all signals to 0": r"received\[0\] of device 0 has got 4, and waits for it want 1: devices",
    "one index": r"nobody has signalled it, but received\[0\] has got 2 where waits want 1",
}


@pytest.mark.parametrize("bug", TOLD)
def test_a_report_says_where_signals_and_copies_went(bug):
    report = report_of(lambda x: both_ways(x, bug))
    assert not report.ok
    text = str(report)
    assert re.search(TOLD[bug], text), text


def test_two_devices_that_write_to_one_place():
    """Each writes to its successor, and to its predecessor too, in place of another inbox."""
    report = report_of(lambda x: both_ways(x, "one inbox"))
    assert "one of them goes to a wrong device or to a wrong place" in str(report)


def test_a_read_before_its_write_is_told_of_one_order_and_once():
    """The two accesses race in both orders, of which only one can be meant."""
    report = report_of(lambda x: both_ways(x, "no count"))
    races = [f for f in report.findings if f.kind == "race"]
    assert len({f.sites for f in races}) == len(races)
    early = [f for f in races if "above_ref" in f.message]
    assert len(early) == 1


def test_of_a_read_of_what_nobody_had_written_only_the_order_after_the_write_is_told():
    (race,) = (f for f in report_of(lambda x: both_ways(x, "no wait")).findings if f.kind == "race")
    assert "the first reads what nobody had written before it. To come after" in race.message
    assert "for the other" not in race.message


def test_devices_that_only_wait_for_others_are_told_last():
    text = report_of(lambda x: both_ways(x, "all signals to 0")).deadlock or ""
    assert "closing" not in text
    assert text.index("waits for semaphore received[0]") < text.index("has ended its body")


def test_semaphores_are_called_by_their_indices():
    def waits(x):
        team = Team.along("x")

        def body(x_ref, out_ref, *, never):
            never.at[1, 2].wait()
            out_ref[...] = x_ref[...]

        return kernel.launch(
            body, x, name="waits", team=team, out_type=[ROW], num_blocks=1,
            semaphore_arrays=dict(never=SemaphoreArray((2, 3))),
        )[0]  # fmt: skip

    assert "semaphore never[1][2] >= 1" in str(report_of(waits))


def test_a_copy_outside_of_its_array_is_told_as_that():
    two_rows = jax.ShapeDtypeStruct((2, 128), jnp.float32)

    def past(x):
        team = Team.along("x")

        def body(x_ref, out_ref, *, row, loaded):
            plgpu.copy_gmem_to_smem(x_ref, row, loaded)
            plgpu.barrier_wait(loaded)
            plgpu.copy_smem_to_gmem(row, out_ref.at[pl.ds(2 * team.device_id(), 1)])

        return kernel.launch(
            body, x, name="past", team=team, out_type=[two_rows], num_blocks=1,
            scratch=dict(row=plgpu.SMEM((1, 128), jnp.float32), loaded=plgpu.Barrier()),
        )[0]  # fmt: skip

    text = str(report_of(past))
    assert re.search(r"no element inside: it begins at \([246], 0\), outside of the array", text)
    assert " -1" not in text
