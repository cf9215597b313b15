"""Which devices kernels can join, and what XLA connects for them, on jobs that are not there."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from stretto.distributed import settings
from stretto.distributed.devices import clique, topology
from stretto.distributed.devices.topology import Domain, Split

VARIABLE = settings.DEVICES_PER_NODE_VARIABLE


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    slice_index: int | None
    client: object = dataclasses.field(default=None, repr=False, compare=False)


def job(nodes: int, processes: int, devices: int, *, own: int = 0) -> list[Device]:
    """The devices of a job: `processes` on each node with `devices` each, seen from one process."""
    client = SimpleNamespace(process_index=lambda: own, devices=lambda: found)
    found = [
        Device(((n * processes) + p) * devices + d, n * processes + p, n, client)
        for n in range(nodes)
        for p in range(processes)
        for d in range(devices)
    ]
    return found


def mesh_of(devices: list[Device], *shape: int, names: tuple[str, ...] = ("node", "gpu")):
    array = np.empty(len(devices), object)
    array[:] = devices
    return SimpleNamespace(
        devices=array.reshape(shape), axis_names=names[: len(shape)], size=len(devices)
    )


def members(devices, shape, axes, names=("node", "gpu")):
    return clique.clique_of(mesh_of(devices, *shape, names=names), axes, "k")  # pyright: ignore[reportArgumentType]


class TestDomains:
    def test_a_process_a_node(self):
        assert topology.domains_of(job(2, 1, 2)) == [Domain(n, n) for n in (0, 0, 1, 1)]

    def test_a_process_a_device(self):
        assert topology.domains_of(job(2, 2, 1)) == [Domain(n, None) for n in (0, 0, 1, 1)]

    def test_processes_that_share_a_node_with_several_devices_each(self):
        assert topology.domains_of(job(1, 2, 2)) == [Domain(0, p) for p in (0, 0, 1, 1)]

    def test_where_the_platform_knows_no_hosts_a_process_is_a_node(self):
        devices = [dataclasses.replace(d, slice_index=None) for d in job(1, 2, 2)]
        assert topology.domains_of(devices) == [Domain(p, p) for p in (0, 0, 1, 1)]

    def test_a_host_that_stands_for_nodes(self, monkeypatch):
        monkeypatch.setenv(VARIABLE, "2")
        assert topology.domains_of(job(1, 1, 4)) == [Domain(n, 0) for n in (0, 0, 1, 1)]
        assert topology.domains_of(job(1, 4, 1)) == [Domain(n, None) for n in (0, 0, 1, 1)]


class TestClique:
    """What is connected for a kernel on one process."""

    def test_of_one_process_with_all_devices(self):
        found = members(job(1, 1, 4), (2, 2), ("gpu",))
        assert (found.shape, found.members) == ((2, 2), (0, 1, 2, 3))

    @pytest.mark.parametrize(("own", "expected"), [(0, (0, 1)), (1, (2, 3))])
    def test_of_a_process_a_node(self, own, expected):
        found = members(job(2, 1, 2, own=own), (2, 2), ("gpu",))
        assert (found.shape, found.members) == ((1, 2), expected)
        assert found.processes == (own, own)

    def test_of_a_process_a_device(self):
        found = members(job(2, 2, 1, own=3), (2, 2), ("gpu",))
        assert (found.shape, found.members, found.processes) == ((1, 2), (2, 3), (2, 3))

    def test_nodes_along_the_second_axis(self):
        """Processes that were dealt out to nodes in turn."""
        devices = [dataclasses.replace(d, slice_index=d.id % 2) for d in job(1, 4, 1, own=1)]
        found = members(devices, (2, 2), ("gpu",), ("gpu", "node"))
        assert (found.shape, found.members) == ((2, 1), (1, 3))

    def test_of_a_process_with_teams_along_two_axes(self):
        found = members(job(2, 1, 4, own=1), (2, 2, 2), ("b", "c"), ("a", "b", "c"))
        assert (found.shape, found.members) == ((1, 2, 2), (4, 5, 6, 7))

    @pytest.mark.parametrize("own", [0, 1])
    @pytest.mark.parametrize(
        ("devices", "shape", "axes", "message"),
        [
            (
                (2, 1, 2),
                (2, 2),
                ("node", "gpu"),
                r"axis \('node', 'gpu'\) joins device 0 \(process 0, node 0\) and device 2"
                r" \(process 1, node 1\), and NVLink joins devices of one node only\. Pass",
            ),
            ((2, 1, 2), (4,), ("node",), r"axis 'node' joins device 0 .* and device 2 \(process 1"),
            ((2, 1, 3), (2, 3), ("node",), r"device 0 \(process 0, node 0\) and device 3"),
            (
                (1, 2, 2),
                (4,),
                ("node",),
                r"device 0 \(process 0, node 0\) and device 2 \(process 1, node 0\), and a kernel"
                r" joins devices of one process, or of processes of one device each",
            ),
        ],
    )
    def test_a_pair_that_no_kernel_joins_is_named(self, devices, shape, axes, message, own):
        """On every process alike, before anything runs."""
        with pytest.raises(NotImplementedError, match=message):
            members(job(*devices, own=own), shape, axes)

    def test_devices_that_are_no_box(self):
        """Three devices a node on a mesh two wide."""
        with pytest.raises(
            NotImplementedError, match=r"k: the devices .*, \[0, 1, 2\]; \[3, 4, 5\], are not equal"
        ):
            members(job(2, 1, 3), (3, 1, 2), ("b",), ("a", "b", "c"))

    def test_ids_with_gaps_between_processes(self):
        """As CPU devices have them."""
        devices = job(1, 2, 2, own=1)
        gaps = [d.id + 2046 * d.process_index for d in devices]
        client = SimpleNamespace(process_index=lambda: 1, devices=lambda: found)
        found = [
            dataclasses.replace(d, id=i, client=client) for d, i in zip(devices, gaps, strict=True)
        ]
        assert members(found, (2, 2), ("gpu",)).members == (2, 3)

    def test_a_permuted_mesh(self):
        with pytest.raises(NotImplementedError, match=r"order \[1, 0\]; it must be \[0, 1\]"):
            members(job(1, 1, 2)[::-1], (2,), ("node",))


class TestOfTheEnclosingMesh:
    """While a program is traced, by the order of the job's devices."""

    def inside(self, shape, names, fun):
        found = []
        mesh = Mesh(
            np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), names,
            axis_types=(AxisType.Auto,) * len(shape),
        )  # fmt: skip

        def body(x):
            found.append(fun())
            return x

        program = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        jax.jit(program).lower(np.zeros(1, np.float32))
        return found[0]

    @pytest.mark.parametrize(
        ("shape", "axes", "per_node", "outer"),
        [
            ((2, 4), ("a", "b"), 4, 1),
            ((2, 4), ("a", "b"), 8, 0),
            ((2, 4), ("b",), 4, 0),
            ((2, 4), ("a",), 4, 1),
            ((2, 4), ("b", "a"), 4, 2),
            ((8,), ("a",), 4, 1),
            ((2, 2, 2), ("a", "b", "c"), 2, 2),
            ((2, 2, 2), ("a", "b", "c"), 4, 1),
            ((2, 2, 2), ("b", "c"), 4, 0),
        ],
    )
    def test_axes_that_span_nodes(self, monkeypatch, shape, axes, per_node, outer):
        monkeypatch.setenv(VARIABLE, str(per_node))
        names = ("a", "b", "c")[: len(shape)]
        found = self.inside(shape, names, lambda: (topology.split(axes), topology.obstacle(axes)))
        assert found[0] == Split(axes[:outer], axes[outer:])
        assert (found[1] is None) == (outer == 0)

    def test_one_process_is_one_node(self):
        assert self.inside((2, 4), ("a", "b"), lambda: topology.obstacle(("a", "b"))) is None

    def test_the_pair_is_named(self, monkeypatch):
        monkeypatch.setenv(VARIABLE, "4")
        found = self.inside((2, 4), ("a", "b"), lambda: topology.obstacle(("a", "b")))
        assert found == (
            "axis ('a', 'b') joins device 0 (process 0, node 0) and device 4 (process 0, node 1),"
            " and NVLink joins devices of one node only."
        )
