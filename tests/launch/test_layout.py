"""From devices to processes, and the errors on the way."""

from __future__ import annotations

import pytest

from stretto.launch.errors import LaunchError
from stretto.launch.planning.layout import HostDevices, one_host, plan, share_devices

TWO_NODES = [HostDevices("a", 4), HostDevices("b", 2)]


def rows(layout):
    return [
        (p.process_id, p.host, p.local_process_id, p.num_local_processes, p.device_ids)
        for p in layout.processes
    ]


def test_gpus_of_a_node_are_one_process_by_default():
    layout = plan(TWO_NODES, "gpu", None)
    assert layout.processes_per == "node"
    assert rows(layout) == [(0, "a", 0, 1, (0, 1, 2, 3)), (1, "b", 0, 1, (0, 1))]
    assert layout.num_devices == 6


def test_one_process_per_gpu():
    layout = plan([HostDevices("a", 2), HostDevices("b", 1)], "gpu", "gpu")
    assert rows(layout) == [(0, "a", 0, 2, (0,)), (1, "a", 1, 2, (1,)), (2, "b", 0, 1, (0,))]
    assert layout.hosts == {"a": 2, "b": 1}


def test_processes_that_share_a_node():
    layout = plan([HostDevices("a", 4)], "gpu", 2)
    assert rows(layout) == [(0, "a", 0, 2, (0, 1)), (1, "a", 1, 2, (2, 3))]
    with pytest.raises(LaunchError, match=r"--processes-per 3 cannot share the 4 devices of a"):
        plan([HostDevices("a", 4)], "gpu", 3)


def test_devices_that_take_turns_on_a_gpu():
    layout = plan([HostDevices("a", 3), HostDevices("b", 2)], "gpu", None, devices_per_gpu=2)
    assert rows(layout) == [
        *((0, "a", 0, 3, (0,)), (1, "a", 1, 3, (0,)), (2, "a", 2, 3, (1,))),
        *((3, "b", 0, 2, (0,)), (4, "b", 1, 2, (0,))),
    ]
    assert layout.num_devices == 5
    assert layout.num_gpus == 3
    assert layout.processes_per == "gpu"


@pytest.mark.parametrize(
    ("count", "platform", "per", "words"),
    [
        (2, "cpu", None, "2 is for jobs on GPUs; leave it out: on CPUs any -n"),
        (2, "gpu", "node", "drop --processes-per node"),
        (2, "gpu", 1, "drop --processes-per 1"),
        (0, "gpu", None, "--devices-per-gpu 0 must be at least 1"),
        (-1, "cpu", None, "--devices-per-gpu -1 must be at least 1"),
    ],
)
def test_devices_cannot_share_a_gpu(count, platform, per, words):
    with pytest.raises(LaunchError, match=words):
        plan([HostDevices("a", 4)], platform, per, devices_per_gpu=count)


def test_cpu_devices_are_processes_by_default():
    assert len(plan([HostDevices("localhost", 4)], "cpu", None).processes) == 4
    assert len(plan([HostDevices("localhost", 4)], "cpu", "node").processes) == 1


@pytest.mark.parametrize(
    ("n", "used"),
    [
        (None, [("a", 4), ("b", 2)]),
        (6, [("a", 4), ("b", 2)]),
        (5, [("a", 4), ("b", 1)]),
        (4, [("a", 4)]),
        (1, [("a", 1)]),
    ],
)
def test_hosts_are_filled_in_order(n, used):
    assert [(h.name, h.num_devices) for h in share_devices(n, TWO_NODES)] == used


@pytest.mark.parametrize(("n", "words"), [(7, "-n 7 .* 6 in all .a:4, b:2"), (0, "at least 1")])
def test_hosts_cannot_be_filled(n, words):
    with pytest.raises(LaunchError, match=words):
        share_devices(n, TWO_NODES)


@pytest.mark.parametrize(
    ("n", "num_gpus", "devices"), [(None, 4, 4), (2, 4, 2), (None, 0, 1), (7, 0, 7)]
)
def test_one_host(n, num_gpus, devices):
    assert one_host(n, num_gpus, None) == HostDevices("localhost", devices)


def test_one_host_has_too_few_gpus():
    with pytest.raises(LaunchError, match=r"-n 5 is more than the 4 GPUs .*pass -n 4"):
        one_host(5, 4, None)
    with pytest.raises(LaunchError, match=r"the 4 GPUs .*for tests, --devices-per-gpu 2"):
        one_host(5, 4, None)
    with pytest.raises(LaunchError, match=r"-n 9 is more than 4 on each of the 2 GPUs .*-n 8"):
        one_host(9, 2, None, devices_per_gpu=4)


def test_one_host_whose_gpus_are_shared():
    assert one_host(3, 1, None, devices_per_gpu=4) == HostDevices("localhost", 3)
    assert one_host(None, 2, None, devices_per_gpu=4) == HostDevices("localhost", 8)
