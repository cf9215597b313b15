"""The time of a call of an operation on a machine, within a node or over several."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence

from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.errors import UnavailableError
from stretto.benchmarks.predict import grouped, network, pipelines
from stretto.benchmarks.predict.model import NOTHING, Model, Predicted
from stretto.benchmarks.predict.samples import fused_way
from stretto.benchmarks.targets import machine_file
from stretto.benchmarks.targets.machine_file import Target
from stretto.kernels.choice import choose, speed
from stretto.kernels.nodes import nodes
from stretto.kernels.operations import OPERATIONS
from stretto.kernels.problem import machine
from stretto.kernels.problem.machine import Machine


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallTime:
    """The time of a call, and its communication.

    Attributes:
      time: of the call.
      alone: of its matmul alone, by XLA; 0 for a collective.
      way: what serves it: "fused", "xla", or "hierarchical" over several nodes.
    """

    time: Predicted
    alone: Predicted
    way: str

    @property
    def exposed_us(self) -> float:
        """The time of the call beyond that of its matmul."""
        return max(0.0, self.time.us - self.alone.us)


def call_time(
    model: Model,
    case: Case,
    target: Target,
    implementation: str = "auto",
    per_node: int = 0,
    pieces: int | None = None,
) -> CallTime:
    """The time of one call.

    Args:
      model: of calls within a node.
      case: the call.
      target: the machine.
      implementation: "fused", "xla", or "auto": what the library would choose.
      per_node: devices of the team on one node; 0 for as many as fit.
      pieces: into how many the traffic between nodes is cut; None for the library's choice.

    Raises:
      UnavailableError: the sizes cannot be cut into the devices' shares, or no kernel serves.
      BenchmarkError: the machine has no card or, for several nodes, no network.
    """
    case.check()
    if case.work.attention:
        raise UnavailableError("attention over split sequences is not predicted")
    if not case.operation.communicates:
        return _on_one_device(model, case, target, implementation)
    alone = _alone(model, case, target)
    if case.devices == 1:
        return CallTime(time=alone, alone=alone, way="xla")
    per_node = per_node or min(case.devices, target.gpus_per_node)
    if per_node < case.devices:
        if case.devices % per_node:
            raise UnavailableError(f"{case.devices} devices are no whole nodes of {per_node}")
        team = _Across(model, case, target, per_node, case.devices // per_node, pieces)
        return _across(team, implementation, alone)
    fused = implementation == "fused" or (implementation == "auto" and is_fused(case, target))
    time = _within(model, case, target, fused)
    return CallTime(time=time, alone=alone, way="fused" if fused else "xla")


def is_fused(case: Case, target: Target) -> bool:
    """Whether `backend="auto"` takes the kernel: by the tuned table of the card, or by estimate."""
    found = _machine_of(machine_file.card_of(target, target.name).name)
    if found.architecture != machine.HOPPER or not case.operation.kernels:
        return False
    kernel, obstacle = choose.serving(case.operation, case.problem(found))
    if obstacle is not None:
        return False
    with warnings.catch_warnings():
        # A plan does not warn that a card has no table; a call does.
        warnings.simplefilter("ignore")
        return speed.faster(case.operation, kernel, case.problem(found)).backend == "pallas"


def _machine_of(card: str) -> Machine:
    """A GPU by its name alone; it starts no backend of JAX's, as `Machine.of_kind` does."""
    return Machine(platform="gpu", kind=card, architecture=machine.architecture_by_name(card))


def _on_one_device(model: Model, case: Case, target: Target, implementation: str) -> CallTime:
    """An operation that sends nothing: rows in groups."""
    if case.itemsize != 2:
        raise UnavailableError("grouped matmuls are predicted for elements of 16 bits")
    if implementation == "xla":
        time = grouped.by_xla(model, case.work, target)
    else:
        time = grouped.grouped_matmul(model, case.work, target)
    return CallTime(time=time, alone=time, way="xla" if implementation == "xla" else "fused")


def _alone(model: Model, case: Case, target: Target) -> Predicted:
    if case.work.product is None:
        return NOTHING
    work = dataclasses.replace(case.work, traffic=None)
    return model.predict("matmul", work, case.itemsize, target)


def _within(model: Model, case: Case, target: Target, fused: bool) -> Predicted:
    if case.devices == 1:
        return _alone(model, case, target)
    if fused:
        way = fused_way(case.work)
    else:
        way = "collective" if case.work.product is None else "unfused"
    return model.predict(way, case.work, case.itemsize, target)


def _across(team: _Across, implementation: str, alone: Predicted) -> CallTime:
    """Hierarchical where the operation is and a kernel serves its part; else XLA over all."""
    case, per_node, target = team.case, team.devices, team.target
    rule = _PIPELINES.get(case.operation.name)
    part = _part(case, per_node, -(-case.sizes["m"] // team.count))
    wanted = implementation == "fused" or (implementation == "auto" and is_fused(part, target))
    if rule is not None and per_node > 1 and wanted:
        return CallTime(time=rule(team), alone=alone, way="hierarchical")
    if case.work.traffic is None:
        raise UnavailableError(f"{case.operation.name} sends nothing between nodes")
    traffic = case.work.traffic
    sent = network.collective(
        team.model, traffic.collective, traffic.size, case.devices, per_node, target
    )
    return CallTime(time=alone + sent, alone=alone, way="xla")


def _part(case: Case, devices: int, rows: int, operation: str = "") -> Case:
    """What a kernel within a node does: so many rows, as many of the other sizes.

    What the whole team shares out of the other sizes stays a device's share.
    """
    sizes = dict(case.sizes)
    share = devices / case.devices
    if case.operation.name == "all_gather_matmul":
        sizes["n"] = round(sizes["n"] * share)
    elif case.work.product is not None:
        sizes["k"] = round(sizes["k"] * share)
    sizes["m"] = rows
    chosen = OPERATIONS[operation] if operation else case.operation
    return dataclasses.replace(case, operation=chosen, sizes=sizes, devices=devices)


@dataclasses.dataclass(frozen=True)
class _Across:
    """A call over `count` nodes, `devices` of the team on each, which may be cut into `pieces`."""

    model: Model
    case: Case
    target: Target
    devices: int
    count: int
    pieces: int | None = None

    def kernel(self, rows: int, operation: str = "") -> Predicted:
        """A kernel within a node, on so many rows of the node's."""
        part = _part(self.case, self.devices, rows, operation)
        return _within(self.model, part, self.target, fused=True)

    def cross(self, rows: float, columns: int) -> Predicted:
        """One device's rows go to another node."""
        return network.crossing(rows * columns * self.case.itemsize, 1.0, self.target)

    def cuts(self, rows: int) -> list[int]:
        """The rows of the pieces that `rows` of a device are cut into, for all other nodes."""
        if self.case.work.product is None:
            size = rows * self.case.sizes["n"] * self.case.itemsize
            most = nodes.most_pieces(size, nodes.LEAST_BYTES, self.pieces)
        else:
            most = nodes.most_pieces(self.devices * rows, nodes.LEAST_ROWS, self.pieces)
        pieces = nodes.pieces_of(rows, max(1, most // (self.count - 1)))
        return [end - first for first, end in pieces] * (self.count - 1)


def _gathers(one: _Across) -> Predicted:
    """The own node's rows first, then the other nodes' as they come."""
    sizes = one.case.sizes
    shard = -(-sizes["m"] // (one.count * one.devices))
    cuts = one.cuts(shard)
    columns = sizes["k"] if "k" in sizes else sizes["n"]
    works = [one.kernel(rows * one.devices) for rows in cuts]
    crossings = [one.cross(rows, columns) for rows in cuts]
    return _each(pipelines.gathers, one.kernel(shard * one.devices), works, crossings)


def _scatters(one: _Across) -> Predicted:
    """The other nodes' rows first; their sums cross; the own rows last."""
    sizes = one.case.sizes
    shard = -(-sizes["m"] // (one.count * one.devices))
    cuts = one.cuts(shard)
    works = [one.kernel(rows * one.devices) for rows in cuts]
    crossings = [one.cross(rows, sizes["n"]) for rows in cuts]
    return _each(pipelines.scatters, one.kernel(shard * one.devices), works, crossings)


def _reduces(one: _Across) -> Predicted:
    """Sums within nodes, sums of those between nodes, and back, piece by piece."""
    m, n = one.case.sizes["m"], one.case.sizes["n"]
    has_product = one.case.work.product is not None
    if has_product:
        most = nodes.most_pieces(m, nodes.LEAST_ROWS, one.pieces)
    else:
        most = nodes.most_pieces(m * n * one.case.itemsize, nodes.LEAST_BYTES, one.pieces)
    rows = [end - first for first, end in nodes.pieces_of(m, most)]
    inside = "matmul_reduce_scatter" if has_product else "reduce_scatter"
    works = [one.kernel(r, inside) for r in rows]
    share = 2 * (one.count - 1) / one.count / one.devices
    crossings = [one.cross(share * r, n) for r in rows]
    back = [_all_gather(one, r, n) for r in rows]
    return _of_bounds(lambda pick: pipelines.reduces(pick(works), pick(crossings), pick(back)))


def _all_gather(one: _Across, rows: int, columns: int) -> Predicted:
    sizes = {"m": rows, "n": columns}
    whole = dataclasses.replace(
        one.case, operation=OPERATIONS["all_gather"], sizes=sizes, devices=one.devices
    )
    return _within(one.model, whole, one.target, fused=True)


type _Pick = Callable[[Sequence[Predicted]], list[float]]


def _of_bounds(ends: Callable[[_Pick], float]) -> Predicted:
    """When a pipeline ends with the likely times, the low ones and the high ones."""
    beyond: dict[str, None] = {}

    def end(name: str) -> float:
        def pick(times: Sequence[Predicted]) -> list[float]:
            beyond.update(dict.fromkeys(word for time in times for word in time.beyond))
            return [getattr(time, name) for time in times]

        return ends(pick)

    us, low, high = end("us"), end("low"), end("high")
    return Predicted(us=us, low=low, high=high, beyond=tuple(beyond))


def _each(
    pipeline: Callable[..., float],
    own: Predicted,
    works: Sequence[Predicted],
    crossings: Sequence[Predicted],
) -> Predicted:
    return _of_bounds(lambda pick: pipeline(*pick([own]), pick(works), pick(crossings)))


_PIPELINES: dict[str, Callable[[_Across], Predicted]] = {
    "all_gather": _gathers,
    "all_gather_matmul": _gathers,
    "reduce_scatter": _scatters,
    "matmul_reduce_scatter": _scatters,
    "all_reduce": _reduces,
    "matmul_all_reduce": _reduces,
}
