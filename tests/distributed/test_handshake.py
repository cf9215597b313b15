"""How kernels meet: what each step is for, in the simulator; launch after launch, in a model."""

from __future__ import annotations

import itertools
import random
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.distributed import handshake, kernel, residency, settings
from stretto.distributed.memory import heap
from stretto.distributed.primitives import heap_semaphores
from stretto.distributed.semaphores import Semaphore
from stretto.distributed.simulator import DeadlockError
from stretto.distributed.team import Team
from stretto.kernels.collectives import summation

ROWS, COLUMNS = 8, 128


def mesh_of(count, shape=None):
    devices = np.array(jax.devices()[:count])
    names = ("x",) if shape is None else ("x", "y")
    devices = devices if shape is None else devices.reshape(shape)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def sum_of(x, axes="x", num_blocks=2):
    config = summation.Config(num_blocks=num_blocks, piece_rows=4)
    return summation.all_reduce(x[None], Team.along(axes), config=config)[0]


def program(devices=3, fun=sum_of, shape=None, **options):
    spec = P("x") if shape is None else P(("x", "y"))
    return jax.jit(
        jax.shard_map(
            lambda x: fun(x, **options),
            mesh=mesh_of(devices, shape),
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
    )


def rows(devices=3):
    x = np.random.default_rng(1).integers(-9, 9, (devices * ROWS, COLUMNS))
    return x.astype(np.float32)


def summed(x, devices=3):
    total = x.reshape(devices, ROWS, COLUMNS).sum(0)
    return np.tile(total, (devices, 1))


pytestmark = pytest.mark.usefixtures("traces_apart")


def leave_out(monkeypatch, method, name):
    original = getattr(Semaphore, method)

    def maybe(self, *args, **kwargs):
        if self.site.semaphore != name:
            original(self, *args, **kwargs)

    monkeypatch.setattr(Semaphore, method, maybe)


class TestSteps:
    """Each is needed, and what goes wrong without it is found."""

    @pytest.mark.parametrize("schedule", ["random", "pct", "round_robin"])
    def test_with_all_of_them(self, schedule):
        x = rows()
        for seed in range(5):
            with st.simulate(seed=seed, schedule=schedule, core_count=4) as report:
                np.testing.assert_array_equal(program()(x), summed(x))
            assert report.ok, str(report)

    @pytest.mark.parametrize("name", ["opening", "observed", "closing"])
    def test_a_dropped_signal_is_a_deadlock(self, monkeypatch, name):
        leave_out(monkeypatch, "signal", name)
        with (
            pytest.raises(DeadlockError, match=rf"semaphore {name}\S* >= "),
            st.simulate(core_count=4),
        ):
            jax.block_until_ready(program()(rows()))

    @pytest.mark.parametrize(
        ("name", "kind"),
        [("opening", "before start"), ("observed", "semaphore not zero"), ("closing", "after end")],
    )
    def test_a_dropped_wait_is_found(self, monkeypatch, name, kind):
        leave_out(monkeypatch, "wait", name)
        found = set()
        for seed in range(4):
            try:
                with st.simulate(seed=seed, core_count=4, on_finding="record") as report:
                    jax.block_until_ready(program()(rows()))
                found |= report.kinds()
            except DeadlockError as error:
                found |= error.report.kinds()
        assert kind in found

    def test_who_says_that_it_has_met_before_it_looks(self, monkeypatch):
        """Block 0 may then take off what the next block still looks for."""

        def meet(self):
            self.observed.signal()
            for peer in self._peers():
                self.opening.at[self.team.slot(peer)].wait()

        monkeypatch.setattr(handshake.Handshake, "wait", meet)
        with pytest.raises(DeadlockError) as caught, st.simulate(core_count=4):
            jax.block_until_ready(program()(rows()))
        report = caught.value.report
        assert "race" in report.kinds() and "takes off what the first waits for" in str(report)

    def test_a_counter_that_is_left_behind_is_an_error(self, monkeypatch):
        """The next launch would take it for its own."""
        original = Semaphore.wait

        def keep(self, value=1, *, decrement=False):
            original(self, value, decrement=decrement and self.site.semaphore != "opening")

        monkeypatch.setattr(Semaphore, "wait", keep)
        with st.simulate(core_count=4, on_finding="record") as report:
            jax.block_until_ready(program()(rows()))
        assert not report.ok and "It lies in the heap" in str(report)

    def test_reports_call_counters_by_their_names(self, monkeypatch):
        leave_out(monkeypatch, "wait", "observed")
        with st.simulate(core_count=4, on_finding="record") as report:
            jax.block_until_ready(program()(rows()))
        assert "semaphore observed of device" in str(report)

    def test_who_closes_in_its_own_way_is_not_done(self):
        def body(x_ref, out_ref, *, handshake):
            handshake.arrive_and_wait()
            handshake.arrive_at_end()

        def launch(x):
            out = jax.ShapeDtypeStruct(x.shape, x.dtype)
            return kernel.launch(
                body, x, name="mine", team=Team.along("x"), num_blocks=1, waiting_warps=1,
                out_type=[out],
            )[0]  # fmt: skip

        with st.simulate(core_count=4), pytest.raises(ValueError, match="of the kernel's own"):
            program(2, fun=launch)(rows(2))


def opens_itself(**options):
    return "skip_device_barrier=True" in str(jax.make_jaxpr(program(**options))(rows()))


def uses_the_heap(**options):
    return "stretto_heap_semaphores" in str(jax.make_jaxpr(program(**options))(rows()))


class TestWhen:
    def test_a_kernel_that_leaves_room_opens_itself(self):
        with st.simulate(core_count=4):
            assert opens_itself(num_blocks=2)

    def test_one_that_fills_the_device_leaves_it_to_xla(self):
        """Or its waiting blocks would keep out a collective that its peer is in already."""
        with st.simulate(core_count=2):
            assert not opens_itself(num_blocks=2)
            assert uses_the_heap(num_blocks=2)  # At its end.
            x = rows()
            np.testing.assert_array_equal(program(num_blocks=2)(x), summed(x))

    @pytest.mark.parametrize("core_count", [4, 132])
    def test_how_much_is_room(self, core_count):
        with st.simulate(core_count=core_count):
            most = max(b for b in range(1, core_count + 1) if residency.leaves_room(b))
        assert most == core_count - max(1, core_count // 16)

    @pytest.mark.parametrize(("tasks", "blocks"), [(1, 99), (99, 99), (112, 112), (9999, 132)])
    def test_few_tasks_leave_room(self, tasks, blocks):
        with st.simulate(core_count=132):
            assert residency.num_blocks_for(tasks) == blocks

    def test_without_a_heap(self):
        with st.simulate(core_count=4) as report, settings.heap(False):
            assert not opens_itself()
            assert not uses_the_heap()
            x = rows()
            np.testing.assert_array_equal(program()(x), summed(x))
        assert report.ok, str(report)

    def test_a_team_of_one_meets_nobody(self):
        with st.simulate(core_count=4):
            assert not opens_itself(devices=1)
            assert not uses_the_heap(devices=1)

    @pytest.mark.parametrize("axes", ["x", "y", ("x", "y")])
    def test_teams_side_by_side(self, axes):
        x = np.random.default_rng(2).integers(-9, 9, (4 * ROWS, COLUMNS)).astype(np.float32)
        parts = x.reshape(2, 2, ROWS, COLUMNS)
        along = {"x": 0, "y": 1}.get(axes, (0, 1))
        want = np.broadcast_to(parts.sum(along, keepdims=True), parts.shape).reshape(x.shape)
        for seed in range(3):
            with st.simulate(seed=seed, core_count=4) as report:
                found = program(4, shape=(2, 2), axes=axes)(x)
            np.testing.assert_array_equal(found, want)
            assert report.ok, str(report)


class TestHeap:
    def test_counters_do_not_overlap(self):
        arrays = (handshake._OPENING, handshake._CLOSING, handshake._OBSERVED)
        words = [range(a.heap_word, a.heap_word + a.size) for a in arrays]
        assert not any(set(a) & set(b) for a, b in itertools.combinations(words, 2))

    def test_a_slot_is_for_any_device_that_xla_connects(self):
        assert handshake._OPENING.size == handshake._CLOSING.size == heap.MAX_SLOTS >= 32

    def test_semaphores_that_do_not_fit_are_refused(self):
        with pytest.raises(ValueError, match="do not fit a slot"):
            heap_semaphores.semaphores((2,), heap.SLOT_BYTES // 4 - 1, name="sem", reverse=False)

    def test_without_gpus_it_is_some_address(self):
        assert heap.address() == heap.ADDRESS_WITHOUT_GPUS
        assert heap.ADDRESS_WITHOUT_GPUS % heap.SLOT_BYTES == 0

    def test_a_failure_stays_one(self, monkeypatch):
        """A second try could not find the others, who have given up too."""
        tries = []

        def fail(processes):
            tries.append(processes)
            raise OSError("process 1 does not come")

        monkeypatch.setattr(heap, "_of_processes", fail)
        made = heap._Heap((0, 1))
        for _ in range(2):
            with pytest.raises(OSError, match=r"process 1 does not come With STRETTO_HEAP=0"):
                made.address()
        assert tries == [(0, 1)]

    def test_processes_have_a_heap_together(self, monkeypatch):
        found = {(0, 1): 1 << 21, (0, 1, 2): 2 << 21}
        monkeypatch.setattr(heap, "_of_processes", found.__getitem__)
        monkeypatch.setattr(heap, "_of_process", lambda: 3 << 21)
        monkeypatch.setattr(heap.topology, "devices_of_job", lambda platform: ["a GPU"])
        heap._heap_of.cache_clear()
        for processes, address in {**found, (0, 0, 0): 3 << 21, (): 3 << 21}.items():
            with heap.joining(processes):
                assert heap.address() == address
        heap._heap_of.cache_clear()

    def test_threads_that_ask_at_once_get_one_heap(self, monkeypatch):
        made = []

        def slowly(ordinals):
            made.append(ordinals)
            time.sleep(0.05)
            return len(made)

        monkeypatch.setattr(heap.heap_memory, "map_slots", slowly)
        monkeypatch.setattr(heap.jax, "local_devices", lambda **_: [])
        monkeypatch.setattr(heap.topology, "devices_of_job", lambda platform: ["a GPU"])
        for made_once in (heap._heap_of, heap._mapped):
            made_once.cache_clear()
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: heap.address(), range(8)))
        for made_once in (heap._heap_of, heap._mapped):
            made_once.cache_clear()
        assert len(made) == 1 and set(found) == {1}

    @pytest.mark.parametrize(("text", "wanted"), [(None, True), ("1", True), ("0", False)])
    def test_the_environment(self, monkeypatch, text, wanted):
        monkeypatch.delenv(settings.HEAP_VARIABLE, raising=False)
        if text is not None:
            monkeypatch.setenv(settings.HEAP_VARIABLE, text)
        assert heap.is_wanted() == wanted

    @pytest.mark.parametrize("text", ["", "yes", "2"])
    def test_what_the_environment_may_not_hold(self, monkeypatch, text):
        monkeypatch.setenv(settings.HEAP_VARIABLE, text)
        with pytest.raises(ValueError, match=r"STRETTO_HEAP=.* must be 0 or 1"):
            heap.is_wanted()


# --- Launch after launch --------------------------------------------------------------------------
# The simulator begins every launch anew. This model keeps the counters: every block is a thread of
# steps, each of one counter, in any order that the waits allow.


class Counters:
    def __init__(self, devices):
        self.opening = np.zeros((devices, devices), int)
        self.closing = np.zeros((devices, devices), int)
        self.observed = np.zeros(devices, int)


def block(counters, device, number, launch, running, broken):
    """The steps of block `number` on `device`: yields what it waits for, a condition."""
    peers = [p for p in launch["team"][device] if p != device]
    if number == 0:
        for peer in peers:
            yield lambda: True
            counters.opening[peer, device] += 1
    for peer in peers:
        yield lambda peer=peer: counters.opening[device, peer] >= 1
        assert running[peer] == running[device], "met a peer that is in another launch"
    yield lambda: True
    counters.observed[device] += 1
    yield lambda: True  # The body.
    for peer in peers:
        assert running[peer] == running[device], "used the memory of a peer that is elsewhere"
        yield lambda: True
        counters.closing[peer, device] += 1
    if number == 0:
        for peer in peers:
            yield lambda peer=peer: counters.closing[device, peer] >= launch["blocks"]
            counters.closing[device, peer] -= launch["blocks"]
        if broken != "observed":
            yield lambda: counters.observed[device] >= launch["blocks"]
        counters.observed[device] -= launch["blocks"]
        for peer in peers:
            yield lambda: True
            if broken == "zeroed":
                counters.opening[device, peer] = 0
            else:
                counters.opening[device, peer] -= 1


def run_launches(seed, devices=4, broken=""):
    """Random launches on all devices, each at its own pace; the counters at the end."""
    random_ = random.Random(seed)
    everybody = tuple(range(devices))
    teams = [
        {d: everybody for d in everybody},
        {d: (d - d % 2, d - d % 2 + 1) for d in everybody},
        {d: tuple(sorted((d, (d + 2) % 4))) for d in everybody},
    ]
    launches = [
        dict(team=random_.choice(teams), blocks=random_.randint(1, 3))
        for _ in range(random_.randint(2, 5))
    ]
    counters = Counters(devices)
    running = [0] * devices
    threads = {d: [] for d in everybody}

    def start(device):
        launch = launches[running[device]]
        made = (
            block(counters, device, n, launch, running, broken) for n in range(launch["blocks"])
        )
        threads[device] = [[thread, next(thread)] for thread in made]

    for device in everybody:
        start(device)
    weights = [random_.choice((1, 1, 5, 30)) for _ in everybody]  # Some are slow.
    while any(threads.values()):
        ready = [(d, t) for d in everybody for t in threads[d] if t[1]()]
        assert ready, "nobody can go on"
        device, thread = random_.choices(ready, [weights[d] for d, _ in ready])[0]
        try:
            thread[1] = next(thread[0])
        except StopIteration:
            threads[device].remove(thread)
            if not threads[device]:
                running[device] += 1
                if running[device] < len(launches):
                    start(device)
    return counters


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_many_launches_of_changing_teams(first):
    for seed in range(first, first + 100):
        counters = run_launches(seed)
        assert not counters.opening.any() and not counters.closing.any()
        assert not counters.observed.any()


@pytest.mark.parametrize("broken", ["zeroed", "observed"])
def test_the_model_finds_what_would_be_wrong(broken):
    def fails(seed):
        try:
            run_launches(seed, broken=broken)
        except AssertionError:
            return True
        return False

    assert any(fails(seed) for seed in range(200))
