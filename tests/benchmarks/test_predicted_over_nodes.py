"""Times over nodes beside what the model says of them, from the links that were measured there."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from stretto.benchmarks.measurements.nodes import SCHEMA, Entry, NodeResults, Version
from stretto.benchmarks.measurements.results import Machine
from stretto.benchmarks.pages import predicted as pages
from stretto.benchmarks.predict import model, network, over_nodes, samples
from stretto.benchmarks.scaling import checked
from stretto.benchmarks.targets import machine_file
from stretto.benchmarks.targets.machine_file import Link, Network

MACHINE = Machine(
    card="NVIDIA H200",
    platform="gpu",
    num_devices=2,
    num_processes=2,
    layout="",
    num_hosts=1,
    driver="",
    versions={},
    commit="0123456",
)
GATHER = "8192x8192x8192"
SENT = 8192 * 8192 * 2 / 2
"""Bytes of lhs that each of two devices has."""


def target_of(per_node: int, gb_per_s: float = 10.0, oversubscription: float = 1.0):
    """A measured machine, the hops of whose network take 5 us."""
    return msgspec.structs.replace(
        machine_file.read("hgx-h200"),
        origin="measured",
        gpus_per_node=per_node,
        within=Link(gb_per_s=350.0, latency_us=20.0),
        between=Network(gb_per_s=gb_per_s, latency_us=25.0, oversubscription=oversubscription),
    )


def times(versions: dict[str, Version], per_node=1, op="all_gather_matmul", shape=GATHER, **target):
    """The rows of a file with one case, on two nodes."""
    found = NodeResults(
        schema=SCHEMA,
        machine=MACHINE,
        nodes=2,
        devices_per_node=per_node,
        unit="us",
        results=[Entry(op=op, shape=shape, type="bfloat16", versions=versions)],
    )
    return over_nodes.times_of(found, target_of(per_node, **target))


def said(version: str, **fields):
    """What the model says of a version."""
    (one,) = times({version: Version(median=1.0)}, **fields)
    return over_nodes.predicted(model.model(), one)


def test_what_is_a_row():
    """A version with a time, unless it is XLA's flat one once more."""
    rows = times(
        {
            over_nodes.FLAT: Version(median=700.0),
            over_nodes.TWO_LEVELS: Version(error="no room"),
            over_nodes.ALONE: Version(median=400.0),
            "Stretto, 1 pieces": Version(median=700.0, backend="xla"),
            "Stretto, 2 pieces": Version(median=600.0, backend="pallas"),
        }
    )
    assert [(one.version, one.us) for one in rows] == [
        (over_nodes.FLAT, 700),
        (over_nodes.ALONE, 400),
        ("Stretto, 2 pieces", 600),
    ]
    assert rows[0].where == "NVIDIA H200, 2 nodes of 1"
    assert rows[0].name == f"all_gather_matmul {GATHER} bfloat16"


def test_what_crosses_takes_as_long_as_the_measured_links_say():
    alone = said(over_nodes.ALONE)
    for rate, share in ((10.0, 1.0), (20.0, 1.0), (20.0, 2.0)):
        found = said(over_nodes.FLAT, gb_per_s=rate, oversubscription=share)
        assert found.us - alone.us == pytest.approx(SENT * share / rate / 1e3 + 5)
        assert network.UNMEASURED in found.beyond
    assert said(over_nodes.TWO_LEVELS).us == pytest.approx(said(over_nodes.FLAT).us)


def test_a_link_that_is_faster_than_a_node_leaves_the_time_within_one():
    inside = said(over_nodes.FLAT, gb_per_s=1e6)
    assert inside.us == pytest.approx(said(over_nodes.FLAT, gb_per_s=1e7).us)
    assert inside.us - said(over_nodes.ALONE).us > SENT / 350e3


@pytest.mark.parametrize(("op", "passes"), [("reduce_scatter", 1), ("all_reduce", 2)])
def test_two_levels_cross_with_a_share_of_each_device(op, passes):
    """On two nodes of two: within the nodes, and a half of the operand between them."""
    found = said(over_nodes.TWO_LEVELS, per_node=2, op=op, shape="8192x8192")
    inside = said(over_nodes.TWO_LEVELS, per_node=2, op=op, shape="8192x8192", gb_per_s=1e6)
    crossing = passes * (SENT / 2 / 10e3 + 5)
    least = network.collective(model.model(), op, SENT, 2, 2, target_of(2)).us
    assert found.us - inside.us == pytest.approx(crossing - least)


def test_more_pieces_hide_more():
    whole, four = (said(f"Stretto, {count} pieces", per_node=2) for count in (1, 4))
    assert four.us < whole.us


def test_a_case_is_predicted_without_its_own_times_within_a_node():
    found = model.model()
    (one,) = times({over_nodes.ALONE: Version(median=1.0)})
    assert any(row.case == one.name for row in samples.all_samples())
    other = found.leaving_out(one.name)
    assert other.fit is found.without[one.name] and other.fit is not found.fit
    assert {row.sample.case for row in found.left_out} - {one.name} == {
        row.sample.case for row in other.left_out
    }
    seen = dataclasses.replace(found, without={})
    assert over_nodes.predicted(seen, one).us != over_nodes.predicted(found, one).us
    assert found.leaving_out("a case that nobody timed") is found


def test_rows_beside_what_was_measured():
    (one,) = times({over_nodes.FLAT: Version(median=7000.0)})
    row = checked.beside(one, over_nodes.predicted(model.model(), one))
    assert (row.peer, row.measured, row.group) == (over_nodes.FLAT, 7000, checked.NODES[True])
    assert row.is_inside == (row.low <= 7000 <= row.high)
    alone = dataclasses.replace(one, version=over_nodes.ALONE)
    assert (
        checked.beside(alone, over_nodes.predicted(model.model(), alone)).group == "matmuls alone"
    )


def test_a_time_whose_samples_scatter_counts_and_is_listed(monkeypatch):
    """Its median lies far beyond its tenth percentile."""
    both = times({over_nodes.FLAT: Version(median=800.0, p10=700.0, p90=900.0)})
    both += times({over_nodes.FLAT: Version(median=1150.0, p10=700.0, p90=2e4)}, shape="64x64x64")
    assert [one.is_disturbed for one in both] == [False, True]
    monkeypatch.setattr(over_nodes, "times", lambda: tuple(both))
    assert [row.measured for row in checked.over_nodes()] == [800, 1150]
    assert [row.measured for row in checked.over_nodes(settled=True)] == [800]
    (said, table) = pages._disturbed(both[0].where)
    assert "more than 15% beyond the tenth percentile" in said
    assert "| `all_gather_matmul` | 64x64x64 | XLA flat | 1150 | 700 |" in table
    assert pages._disturbed("another job") == []


def test_versions_without_a_prediction():
    with pytest.raises(ValueError, match=r"version 'XLA ring' of all_gather_matmul .* has no pred"):
        said("XLA ring")
