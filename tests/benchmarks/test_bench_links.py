"""`stretto bench links`: every link is met, and its times become alpha, beta, a machine file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from stretto.benchmarks.commands import bench as command
from stretto.benchmarks.errors import BenchmarkError
from stretto.benchmarks.links import machine_of
from stretto.benchmarks.links.measure import SCHEMA, Links, link_time
from stretto.benchmarks.links.paths import BETWEEN, WITHIN, nodes_of, paths_of
from stretto.benchmarks.links.paths import Path as Transfer
from stretto.benchmarks.measurements.results import Machine
from stretto.benchmarks.targets import machine_file
from stretto.distributed import settings

ROOT = Path(__file__).parents[2]
CARD = "NVIDIA H200"


def links_of(nodes: int, devices: int, rates: dict[tuple[str, bool], float]) -> Links:
    """A job's links, whose rates in GB/s are by (link, everyone), after 10 us."""
    places = [list(range(n * devices, (n + 1) * devices)) for n in range(nodes)]
    sizes = (4096, 1 << 20)
    found = []
    for path in paths_of(places):
        rate = rates[path.link, path.everyone]
        found.append(link_time(path, sizes, [10.0, 10.0 + (sizes[1] - sizes[0]) / rate / 1e3]))
    machine = Machine(
        card=CARD,
        platform="gpu",
        num_devices=nodes * devices,
        num_processes=nodes,
        layout="",
        num_hosts=nodes,
        driver="",
        versions={},
        commit="0123456",
    )
    return Links(
        schema=SCHEMA,
        machine=machine,
        measurement_of_speed=True,
        nodes=nodes,
        devices_per_node=devices,
        links=found,
    )


def test_every_pair_of_a_node_is_met_on_all_nodes_at_once():
    found = [path for path in paths_of([[0, 1, 2], [3, 4, 5]]) if path.link == WITHIN]
    assert [path.pairs for path in found if not path.both_ways] == [
        ((0, 1), (3, 4)),
        ((0, 2), (3, 5)),
        ((1, 2), (4, 5)),
    ]
    assert sum(path.both_ways for path in found) == 3


def test_nodes_meet_their_neighbours_alone_and_all_at_once():
    found = [path for path in paths_of([[0, 1], [2, 3], [4, 5]]) if path.link == BETWEEN]
    alone = [path.pairs for path in found if not path.both_ways and not path.everyone]
    assert alone == [((0, 2),), ((2, 4),), ((4, 0),)]
    (everyone,) = [path.pairs for path in found if path.everyone]
    assert everyone == ((0, 2), (1, 3), (2, 4), (3, 5), (4, 0), (5, 1))


def test_both_ways_sends_to_those_who_send():
    both = Transfer(link=WITHIN, name="", pairs=((0, 1),), both_ways=True)
    assert both.there == [(0, 1), (1, 0)]


def test_one_device_has_no_links():
    with pytest.raises(BenchmarkError, match="one device has no links; start a job of several"):
        paths_of([[0]])


def test_nodes_that_are_not_alike():
    with settings.nodes_of(3), pytest.raises(BenchmarkError, match="nodes of 3, 3, 2 devices"):
        nodes_of(jax.devices()[:8])


def test_alpha_and_beta():
    path = Transfer(link=WITHIN, name="", pairs=((0, 1),))
    found = link_time(path, (1000, 101_000), [5.0, 6.0])
    assert found.latency_us == 5 and found.gb_per_s == pytest.approx(100)


def test_a_machine_file_of_measured_links():
    rates = {(WITHIN, False): 360.0, (BETWEEN, False): 48.0, (BETWEEN, True): 24.0}
    found = machine_of.target_of(links_of(2, 4, rates), ["mlx5_0"])
    assert found.origin == "measured" and found.gpus_per_node == 4
    assert found.within.gb_per_s == 360 and found.within.latency_us == 10
    assert found.between is not None and found.between.gb_per_s == 48
    assert found.between.oversubscription == 2 and found.between.interfaces == ("mlx5_0",)
    assert found.card == machine_file.read("hgx-h200").card
    assert found.sources["card.memory_gb"].startswith("https://")
    assert "commit 0123456" in found.sources["within.gb_per_s"]


def test_a_node_has_no_network_and_single_devices_no_machine_file():
    rates = {(WITHIN, False): 360.0, (BETWEEN, False): 48.0, (BETWEEN, True): 24.0}
    assert machine_of.target_of(links_of(1, 2, rates)).between is None
    with pytest.raises(BenchmarkError, match="--machine-out needs two devices on a node"):
        machine_of.target_of(links_of(2, 1, rates))


def test_nodes_of_one_device_take_the_links_within_from_another_file():
    rates = {(WITHIN, False): 360.0, (BETWEEN, False): 48.0, (BETWEEN, True): 24.0}
    node = machine_of.target_of(links_of(1, 2, rates))
    found = machine_of.target_of(links_of(2, 1, rates), within=node)
    assert (found.gpus_per_node, found.within) == (1, node.within)
    assert found.between is not None and found.between.gb_per_s == 48
    assert found.sources["within.latency_us"] == node.sources["within.latency_us"]
    with pytest.raises(BenchmarkError, match="pass --within with a machine file that was measured"):
        machine_of.target_of(links_of(2, 1, rates), within=machine_file.read("hgx-h200"))


def test_it_runs_in_one_process(tmp_path, capsys):
    """Four nodes of two; nothing is published of a CPU, which the file then lacks."""
    path = tmp_path / "m.toml"
    with settings.nodes_of(2):
        assert command.main(["links", "--json", "--machine-out", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["nodes"], found["devices_per_node"]) == (4, 2)
    assert found["measurement_of_speed"] is False
    assert len(found["links"]) == 2 * (1 + 4) + 1
    assert all(one["gb_per_s"] > 0 and one["latency_us"] > 0 for one in found["links"])
    target = machine_file.read(str(path))
    assert target.card is None and target.between is not None


@pytest.mark.slow
def test_it_runs_between_processes(tmp_path):
    """By gloo, two processes of two devices."""
    path = tmp_path / "m.toml"
    script = [str(ROOT / "benchmarks/__main__.py"), "links", "--machine-out", str(path)]
    options = ["-n", "4", "--processes-per", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "stretto.launch", "run", *options, *script],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "every GPU to the next node" in done.stdout
    assert machine_file.read(str(path)).gpus_per_node == 2
