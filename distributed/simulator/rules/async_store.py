"""Asynchronous stores of registers to shared memory of a block of the cluster (`st.async`)."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from stretto.distributed.simulator.program import Compiler, Step, rule
from stretto.distributed.simulator.state.barriers import Barrier, pick
from stretto.distributed.simulator.state.copies import Copy
from stretto.distributed.simulator.state.memory import Region
from stretto.distributed.simulator.state.reductions import REDUCTIONS
from stretto.distributed.simulator.state.views import plan_view


class AsyncStore(Copy):
    """A store that a task has issued, and that lands later."""

    __slots__ = ()

    def describe(self) -> str:
        """The store in words."""
        issuer = self.issuer.describe()
        return f"the asynchronous store to {self.destination.describe()} issued by {issuer}"


@rule("async_store_smem")
def _async_store_smem(compiler: Compiler, eqn: Any) -> Step:
    """One arrival at the target block's barrier, which then waits for the bytes to land, too."""
    p = eqn.params
    value_atom, ref, barrier, position, *leaves = eqn.invars
    count = p["ref_transforms_treedef"].num_leaves
    target = plan_view(compiler, ref, p["ref_transforms_treedef"].unflatten(leaves[:count]))
    notified = plan_view(
        compiler, barrier, p["barrier_transforms_treedef"].unflatten(leaves[count:])
    )
    for view in (target, notified):
        view.cluster = ((p["cluster_dim"],), (compiler.reader(position),))
    value, reduction, site = compiler.slot(value_atom), p["atomic"], compiler.site

    def step(task: Any, env: list) -> Generator:
        yield
        region = target.region(task, env)
        array = notified.owner(task, env)
        item = array.items[pick(notified, array, env)]
        data = np.array(env[value])
        item.expect(data.nbytes)
        item.arrive(task, site)
        store = AsyncStore(task, site, region)
        store.start(_body(store, data, region, item, reduction))
        task.machine.pending_loads.append(store)

    return True, step


def _body(
    store: AsyncStore, data: np.ndarray, target: Region, barrier: Barrier, reduction: str | None
) -> Generator:
    machine = store.issuer.machine
    store.mark_read()
    yield
    begin = machine.now(store)
    device = store.issuer.device.index
    store.time = machine.cost.copy_end(store.time, device, device, data.nbytes)
    atomic = None if reduction is None else "gpu"
    machine.detector.write(target, store.access("copy's write", store.writing, atomic))
    target.set(data if reduction is None else REDUCTIONS[reduction](target.get(), data))
    machine.note(store, f"store to {store.destination.describe()}", begin)
    store.mark_written()
    barrier.land(data.nbytes, store.writing, store.time)
