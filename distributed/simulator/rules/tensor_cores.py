"""What Blackwell's tensor cores are given to do: products, and copies into tensor memory."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from stretto.distributed.simulator.program import Compiler, Step, rule
from stretto.distributed.simulator.refusals.unsupported import SPARSE
from stretto.distributed.simulator.reports.errors import UnsupportedKernelError
from stretto.distributed.simulator.rules.arrays import matmul
from stretto.distributed.simulator.state import tensor_memory
from stretto.distributed.simulator.state.arithmetic import widen
from stretto.distributed.simulator.state.barriers import BarrierArray, pick
from stretto.distributed.simulator.state.memory import Region
from stretto.distributed.simulator.state.tensor_cores import Operation, TensorCores
from stretto.distributed.simulator.state.views import ViewPlan, plan_view

type Arrange = Callable[[np.ndarray], np.ndarray]

LANES = 128  # of tensor memory
_VIEWS = ("acc", "a", "b", "barrier", "a_scale", "b_scale", "a_sparse_metadata")


def _views(compiler: Compiler, eqn: Any) -> dict[str, ViewPlan]:
    """The views of a product's operands, by name; those that it has."""
    p = eqn.params
    has = dict(barrier=p["arrive"], a_scale=p["scaled"], b_scale=p["scaled"])
    has["a_sparse_metadata"] = p["sparse"]
    names = [name for name in _VIEWS if has.get(name, True)]
    atoms = [*eqn.invars[:3], *eqn.invars[4:]]  # The fourth says whether to accumulate.
    refs, leaves = dict(zip(names, atoms, strict=False)), atoms[len(names) :]
    views = {}
    for name in _VIEWS:
        tree = p[f"{name}_transforms_tree"]
        count = 0 if tree is None else tree.num_leaves
        if name in refs:
            transforms = () if tree is None else tree.unflatten(leaves[:count])
            views[name] = plan_view(compiler, refs[name], transforms)
        leaves = leaves[count:]
    return views


def _pair(task: Any, axis: Any) -> list[Any]:
    """The blocks that a product or copy is of, the task's own or both of its pair; none if it is
    the other one that issues it for both."""
    if axis is None:
        return [task.block]
    blocks = task.machine.cluster_blocks(task.block, (axis,))
    return blocks if blocks[0] is task.block else []


def _in_block(task: Any, ref: Any, block: Any) -> Any:
    """The same allocation as `ref` in a block of the cluster."""
    return block.shared.get(ref.key) or task.machine.allocate(block, ref)


def _regions(task: Any, view: ViewPlan, env: list, blocks: list[Any]) -> list[Region]:
    """What a view means in each of `blocks`."""
    ref = view.owner(task, env)
    return [view.within(_in_block(task, ref, block), env) for block in blocks]


@rule("tcgen05_mma")
def _tcgen05_mma(compiler: Compiler, eqn: Any) -> Step:
    if eqn.params["sparse"]:
        raise UnsupportedKernelError(SPARSE)
    views, axis, site = _views(compiler, eqn), eqn.params["collective_axis"], compiler.site
    accumulates, notified = compiler.reader(eqn.invars[3]), views.pop("barrier", None)

    def step(task: Any, env: list) -> Generator:
        yield
        blocks = _pair(task, axis)
        if not blocks:
            return
        regions = {name: _regions(task, view, env, blocks) for name, view in views.items()}
        run = _product(regions, bool(accumulates(env)))
        tensor_cores = TensorCores.of(task)
        operation = tensor_cores.issue("tcgen05_mma", task, site, run)
        for region in (*regions["a"], *regions["b"]):
            if region.buffer.space == "smem":
                access = operation.access("read")
                task.machine.checks.committed(region, access, task.committed)
        if notified is not None:
            _commit(task, tensor_cores, notified, env, blocks, site)

    return True, step


def _product(regions: dict[str, list[Region]], accumulate: bool) -> Callable[[Operation], None]:
    """What the tensor cores do: of a pair of blocks each has half the rows of the left operand and
    of the result, and half the columns of the right one."""

    acc_rows = regions["acc"][0].get().shape[0]

    def run(operation: Operation) -> None:
        rhs = np.concatenate([_read(operation, r) for r in regions["b"]], axis=1)
        rhs_scales = regions.get("b_scale")
        if rhs_scales is not None:
            of_rhs = _read(operation, rhs_scales[0])
            if acc_rows * len(regions["acc"]) == LANES:
                of_rhs = _of_columns(of_rhs, rhs.shape[1])
            rhs = rhs * _spread(of_rhs.T, rhs.shape)
        flops = 0
        for index, acc in enumerate(regions["acc"]):
            lhs = _read(operation, regions["a"][index])
            if "a_scale" in regions:
                lhs = lhs * _spread(_read(operation, regions["a_scale"][index]), lhs.shape)
            total = matmul(lhs, rhs, acc.get().dtype)
            if accumulate:
                total = total + _read(operation, acc)
            _write(operation, acc, total)
            flops += 2 * lhs.shape[0] * lhs.shape[1] * rhs.shape[1]
        _count(operation, flops)

    return run


def _of_columns(scales: np.ndarray, columns: int) -> np.ndarray:
    """Of `SCALES_M64_COLLECTIVE_LAYOUT`, whose halves are filled up to 128 rows, those in use."""
    if scales.shape[0] != 2 * LANES:
        return scales
    halves = np.split(scales, 2)
    return np.concatenate([half[: columns // 2] for half in halves])


def _count(operation: Operation, flops: int) -> None:
    machine = operation.issuer.machine
    machine.report.statistics.flops += flops
    machine.cost.matmul(TensorCores.of(operation.issuer), flops)


def _spread(scales: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Scales of blocks along the contraction, one for each element; rows that fill up left out."""
    rows, columns = shape
    axis = 0 if scales.shape[0] < rows else 1
    count = shape[axis] // scales.shape[axis]
    return np.repeat(scales, count, axis=axis)[:rows, :columns]


def _read(operation: Operation, region: Region) -> np.ndarray:
    """What the tensor cores read, in float32 or wider."""
    machine, access = operation.issuer.machine, operation.access("read")
    if region.buffer.space == "tmem":
        tensor_memory.read(machine, region, access, operation.tensor)
    else:
        machine.detector.read(region, access)
    machine.touch_shared(region.buffer, access, operation.issuer.block)
    return widen(np.array(region.get()))


def _write(operation: Operation, region: Region, value: np.ndarray) -> None:
    """What the tensor cores write to tensor memory."""
    machine, access = operation.issuer.machine, operation.access("write")
    tensor_memory.write(machine, region, access, operation.tensor)
    machine.touch_shared(region.buffer, access, operation.issuer.block)
    region.set(value)


def _commit(
    task: Any, tensor_cores: TensorCores, view: ViewPlan, env: list, blocks: list, site: Any
) -> None:
    array: BarrierArray = view.owner(task, env)
    index = pick(view, array, env)
    barriers = [_in_block(task, array, block).items[index] for block in blocks]
    tensor_cores.commit(barriers, task, site)


@rule("tcgen05_commit_arrive")
def _tcgen05_commit_arrive(compiler: Compiler, eqn: Any) -> Step:
    tree, axis = eqn.params["barrier_transforms_tree"], eqn.params["collective_axis"]
    transforms = () if tree is None else tree.unflatten(eqn.invars[1:])
    view, site = plan_view(compiler, eqn.invars[0], transforms), compiler.site

    def step(task: Any, env: list) -> Generator:
        yield
        blocks = _pair(task, axis)
        if blocks:
            _commit(task, TensorCores.of(task), view, env, blocks, site)

    return True, step


def _copy_rule(
    compiler: Compiler, eqn: Any, name: str, arrange: Callable[[tuple, tuple], Arrange]
) -> Step:
    """A copy from shared to tensor memory.

    `arrange` makes of the shapes here and there what brings the data into the order there.
    """
    p, axis, site = eqn.params, eqn.params["collective_axis"], compiler.site
    leaves = list(eqn.invars[2:])
    count = p["smem_tree"].num_leaves
    here, there = p["smem_tree"].unflatten(leaves[:count]), p["tmem_tree"].unflatten(leaves[count:])
    source, target = (
        plan_view(compiler, atom, transforms)
        for atom, transforms in zip(eqn.invars[:2], (here, there), strict=True)
    )
    arranged = arrange(_shape(eqn.invars[0], here), _shape(eqn.invars[1], there))

    def step(task: Any, env: list) -> Generator:
        yield
        blocks = _pair(task, axis)
        if not blocks:
            return
        sources = _regions(task, source, env, blocks)
        pairs = [*zip(sources, _regions(task, target, env, blocks), strict=True)]

        def run(operation: Operation) -> None:
            for smem, tmem in pairs:
                _read(operation, smem)
                _write(operation, tmem, arranged(np.array(smem.get())))

        operation = TensorCores.of(task).issue(name, task, site, run)
        for smem, _ in pairs:
            task.machine.checks.committed(smem, operation.access("read"), task.committed)

    return True, step


def _shape(atom: Any, transforms: Any) -> tuple[int, ...]:
    """The shape of a ref through its transforms."""
    aval = atom.aval
    for transform in transforms:
        aval = transform.transform_type(aval)
    return tuple(aval.shape)


@rule("async_copy_smem_to_tmem")
def _async_copy_smem_to_tmem(compiler: Compiler, eqn: Any) -> Step:
    return _copy_rule(
        compiler, eqn, "async_copy_smem_to_tmem", lambda here, there: lambda data: data
    )


@rule("async_copy_scales_to_tmem")
def _async_copy_scales_to_tmem(compiler: Compiler, eqn: Any) -> Step:
    return _copy_rule(compiler, eqn, "async_copy_scales_to_tmem", _rows_of_scales)


def _rows_of_scales(here: tuple[int, ...], there: tuple[int, ...]) -> Arrange:
    """`[rows / 128, columns / 4, 32, 16]` as they lie in shared memory -> `[rows, columns]`.

    Or `[1, columns / 4, 64, 16]` of 256 rows, for pairs of blocks that have 64 rows of lhs each.

    As `async_copy_scales_to_tmem` of JAX describes the arrangement.
    """
    rows, columns = there
    known = rows // 128, columns // 4, 32, 16
    of_pairs = 1, columns // 4, 64, 16
    if here == of_pairs and rows == 2 * LANES:  # SCALES_M64_COLLECTIVE_LAYOUT
        halves = columns // 4, 2, 32, 4, 4
        return lambda data: data.reshape(halves).transpose(1, 3, 2, 0, 4).reshape(there)
    if here != known:
        raise UnsupportedKernelError(
            f"scales of shape {here} in shared memory for {there} in tensor memory; the simulator"
            f" knows {known}, which is SCALES_LAYOUT, and for 256 rows {of_pairs}, which is"
            " SCALES_M64_COLLECTIVE_LAYOUT"
        )
    apart = rows // 128, columns // 4, 32, 4, 4
    return lambda data: data.reshape(apart).transpose(0, 3, 2, 1, 4).reshape(there)
