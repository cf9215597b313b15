"""The record of an operation, from which everything else about it is made.

`stretto.explain`, the fallback on XLA, the gradients, the tuned tables, `stretto bench` and
`stretto tune`, and the tests read the record. The public functions
(`operations/`) are written by hand and call `perform.decide` with their record; a record names its
kernels, and a kernel names its device code, so that every step can be followed by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from stretto.distributed.devices.topology import Split
from stretto.kernels.problem.problem import Problem
from stretto.kernels.problem.scales import Granularity
from stretto.kernels.problem.work import Work

type Axes = tuple[Hashable, ...]
type Arrays = Any  # An array, or a tuple of arrays or of tuples of them.
type Sizes = Mapping[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Kernel:
    """A fused implementation of an operation.

    Attributes:
      Config: the type of its configurations: a frozen dataclass with `check(problem)`, which
        raises ValueError for one that cannot be built. Tuned tables hold its fields.
      run: (operands, call) -> results; launches the kernel.
      obstacle: why the kernel cannot serve a problem, None if it can.
      default: the configuration for a problem that no table has.
      candidates: what the tuner tries for a problem, or for all, given None; likely ones first.
      fitted: (configuration that was fastest at near sizes, problem) -> the one for this problem.
      fused_from: bytes of one device's operand from which on the kernel is the faster one, for a
        kernel that only moves; None where `choice.costs` estimates both times.
      untried: it was never timed beside XLA on several GPUs: `auto` uses it only where a table
        shows that it is faster.
      recorded_to: of a kernel whose devices exchange through the heap alone, so that a program that
        is recorded may have it: bytes of one device's operand up to which it was measured to be
        faster than XLA there. None for a kernel that must not be recorded.
      unrecorded_to: of such a kernel, the same in programs that are not recorded; it is then taken
        before the others.
      stands_for: the problem whose tuned entries and estimate apply to this one, with the bytes
        that XLA moves in memory in addition; None for a kernel with entries of its own.
      parts: of a kernel that is several, apart from what XLA's implementation has, too: problem ->
        each of these and its problem. Where no table has an entry near, what tables say of them
        decides: it is faster if all of them are.
      copies: (problem, configuration) -> bytes that XLA copies because of the sizes, or whose copy
        would take as long as what the kernel loses by them; even sizes cost none.
      apart: problem -> the configuration in two parts, XLA's matmul and a kernel of the collective
        alone, whose own table says what it saves; None where that kernel's parts are copied.
      beside: (configuration, options, layout and type of each array) -> why XLA must apply an
        epilogue with arrays, or of two products, after the kernel; None where the kernel applies
        it. None for a kernel that applies none of those.
    """

    Config: type
    run: Callable[[Arrays, Call], Arrays]
    obstacle: Callable[[Problem], str | None]
    default: Callable[[Problem], Any]
    candidates: Callable[[Problem | None], Iterator[Any]]
    fitted: Callable[[Any, Problem], Any] = lambda config, problem: config
    fused_from: int | None = None
    untried: bool = False
    recorded_to: int | None = None
    unrecorded_to: int = 0
    stands_for: Callable[[Problem], tuple[Problem, int]] | None = None
    parts: Callable[[Problem], Sequence[tuple[Kernel, Problem]]] | None = None
    copies: Callable[[Problem, Any], int] = lambda problem, config: 0
    apart: Callable[[Problem], Any] | None = None
    beside: Callable[[Any, Any, Sequence[tuple[str, Any]]], str | None] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BetweenNodes:
    """An operation over several nodes: kernels within each, XLA's collectives between.

    Attributes:
      run: (operands, call) -> results; `call.split` has the axes within a node.
      divided: the sizes that are divided among the nodes; a kernel serves one part.
    """

    run: Callable[[Arrays, Call], Arrays]
    divided: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operand:
    """An operand of one device, for tests and benchmarks.

    Attributes:
      shape: of the array.
      dtype: its type; None for the type that is being tested or timed.
      draw: a random key -> values, of this shape; for operands that cannot be any numbers, such as
        sizes of groups. None for normal numbers or, of an integer type, for any from -100 to 99.
    """

    shape: tuple[int, ...]
    dtype: str | None = None
    draw: Callable[[jax.Array], jax.Array] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Examples:
    """How tests and benchmarks call an operation.

    Attributes:
      shapes: (name of a set, devices) -> sizes of the whole problem; none where the set has none.
      operands: (sizes, devices) -> one device's operands, in the order of the public function.
      needs: (sizes, devices) -> divisions without remainder, as (name, size, divisor).
      keywords: further arguments of the public function.
      keywords_of: sizes -> further arguments that depend on them and are not in `passed`.
      timed: (sizes, the call) -> the function that benchmarks time: the call, or its derivative.
      passed: the sizes that it takes as keyword arguments, by their names.
      named: names of the last operands, which the public function takes by keyword.
      scales: of operands in 8 bits, the granularity of their scales.
      sets: the names of the sets that it has shapes of, in the order in which they are listed.
      values: other operands, by the name of how they are drawn; each as `operands`.
      problem: (sizes, devices) -> sizes of the `Problem` that such a call is; the same by default.
      defined: one device's results -> the same with zeros in place of what the operation leaves
        undefined, so that two programs can be compared.
    """

    shapes: Callable[[str, int], Sequence[Sizes]]
    operands: Callable[[Sizes, int], tuple[Operand, ...]]
    needs: Callable[[Sizes, int], Iterable[tuple[str, int, int]]] = lambda sizes, devices: ()
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    keywords_of: Callable[[Sizes], Mapping[str, Any]] = lambda sizes: {}
    timed: Callable[[Sizes, Callable], Callable] = lambda sizes, call: call
    passed: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    scales: Granularity | None = None
    sets: tuple[str, ...] = ()
    values: Mapping[str, Callable[[Sizes, int], tuple[Operand, ...]]] = dataclasses.field(
        default_factory=dict
    )
    problem: Callable[[Sizes, int], Sizes] = lambda sizes, devices: sizes
    defined: Callable[[Arrays], Arrays] = lambda results: results


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Operation:
    """One operation.

    Attributes:
      name: in tables, reports and errors.
      public: the function that users call.
      sizes: names of a problem's sizes, in their order, as in "8192x8192x28672".
      reference: (operands, axes, options) -> results, through `jax.lax`: `backend="xla"` on any
        platform, and the expected result in tests. Differentiable by JAX.
      backward: (call, residuals, cotangents of the results) -> cotangents of the operands.
      forward: (operands, call) -> (results, residuals), for a fused call that is differentiated.
        None for an operation that is linear in its operands: it has no residuals, and its tangent
        is the operation itself.
      residuals_of: of an operation that is linear in either operand: operands -> the residuals of
        `backward`, nothing computed before. None where `jax.linear_transpose` is not served.
      tangent: (call, residuals, tangents of the operands) -> tangents of the results, by XLA; None
        for that of the reference, where the residuals are the operands.
      layout: (specs of the operands, axes, keyword arguments) -> specs of the results, for calls
        outside `shard_map`; None where the caller must pass them.
      joined: (results, operands, specs of the operands, axes) -> a device's results in such a
        call, summed over the other axes that split whole arrays; None where nothing is summed.
      batched: (launch, size of a batch, which operands have it in front, operands, call) -> what
        `launch(operands, call)` is of each, the batch in front, by one launch; None, or no rule,
        where `vmap` takes a launch for each.
      work: a problem's work on one device.
      kernels: fused implementations; the first without an obstacle serves.
      between_nodes: its version for several nodes; None where XLA serves there.
      examples: how tests and benchmarks call it.
      communicates: whether it runs over a team, whose mesh axis follows its operands; if
        not, on each device alone.
    """

    name: str
    public: Callable[..., Arrays]
    sizes: tuple[str, ...]
    reference: Callable[[Arrays, Axes, Any], Arrays]
    backward: Callable[[Call, Any, Arrays], Arrays]
    work: Callable[[Problem], Work]
    kernels: tuple[Kernel, ...]
    examples: Examples
    forward: Callable[[Arrays, Call], tuple[Arrays, Any]] | None = None
    residuals_of: Callable[[Arrays], Any] | None = None
    tangent: Callable[[Call, Any, Arrays], Arrays] | None = None
    layout: Callable[[Sequence[Any], Axes, Mapping[str, Any]], Any] | None = None
    joined: Callable[[Arrays, Arrays, Sequence[Any], Axes], Arrays] | None = None
    batched: Callable[[Callable, int, Any, Arrays, Call], Arrays | None] | None = None
    between_nodes: BetweenNodes | None = None
    communicates: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """The static facts of a call that a kernel serves.

    It is hashable, as `jax.custom_jvp` requires of arguments that are not differentiated.

    Attributes:
      operation: the called operation.
      kernel, config: the kernel that serves it, and its configuration.
      axes: the mesh axes of the team.
      options: the operation's own; a frozen dataclass.
      backend: the caller's `backend`; derivatives use the same.
      interpret: the argument of `kernel.launch`.
      split: the axes within a node, where the team spans nodes.
      pieces: of a call over several nodes; None for a suitable number.
      typed: whether `shard_map` types values as varying or not (`check_vma=True`).
    """

    operation: Operation
    kernel: Kernel
    config: Any
    axes: Axes
    options: Any
    backend: str
    interpret: Any = None
    split: Split | None = None
    pieces: int | None = None
    typed: bool = False

    def with_options(self, **options: Any) -> Call:
        """The same call with some other options."""
        return dataclasses.replace(self, options=dataclasses.replace(self.options, **options))
