"""Cases of `compile_cases`: mixtures of experts, and matmuls of groups of rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import expert_programs
import jax
import jax.numpy as jnp
from compile_programs import Program, on_one

import stretto as st
from stretto.distributed.team import Team
from stretto.distributed.tools import aot
from stretto.kernels.collectives import combine, dispatch
from stretto.kernels.fused import dispatch_matmul, group_activation, matmul_combine
from stretto.kernels.fused.activated import Activated
from stretto.kernels.operations import OPERATIONS
from stretto.kernels.problem.activations import ClampedSwiglu, swiglu

EXPERTS = ("expert_dispatch", "expert_combine", "mixture_of_experts")


def example(name: str, *, derivatives: bool = False) -> Iterator[Program]:
    """The first of an operation's examples in bfloat16, or its derivatives."""
    record, mesh = OPERATIONS[name], aot.mesh_of_gpus((4,), ("x",))
    sizes = record.examples.shapes("tiny", 4)[0]
    operands = record.examples.operands(sizes, 4)
    shapes = [(operand.shape, operand.dtype or jnp.bfloat16) for operand in operands]
    options = {"backend": "pallas", **record.examples.keywords}
    options |= {name: sizes[name] for name in record.examples.passed}
    axis = ("x",) if record.communicates else ()

    def call(*xs):
        return record.public(*xs, *axis, **options)

    def pulled(*xs):
        out, pull = jax.vjp(call, *xs)
        return [x for x in pull(out) if x.dtype != jax.dtypes.float0]

    yield name, *on_one(pulled if derivatives else call, mesh, shapes)


def few_tokens_of_experts() -> Iterator[Program]:
    """The dispatch that makes the tables, and the combine of small chunks."""
    mesh = aot.mesh_of_gpus((4,), ("x",))
    tokens, top_k, experts, d = 64, 8, 128, 2048
    entries = (tokens, top_k)

    def sent(x, index):
        config = dispatch.Config(tables=True)
        return st.expert_dispatch(x, index, "x", num_experts=experts, config=config)

    def combined(rows, weights, positions):
        config = combine.Config(chunk=4)
        return st.expert_combine(rows, weights, positions, "x", config=config)

    x, index = ((tokens, d), jnp.bfloat16), (entries, jnp.int32)
    yield "tables in the dispatch", *on_one(sent, mesh, [x, index])
    rows = (4 * tokens * top_k, d), jnp.bfloat16
    yield "combine", *on_one(combined, mesh, [rows, (entries, jnp.float32), index])


def many_tokens_of_experts() -> Iterator[Program]:
    """The dispatch that makes the tables, and the combines that add up sums of devices."""
    mesh = aot.mesh_of_gpus((4,), ("x",))
    tokens, top_k, experts, d = 8192, 8, 128, 2048
    entries = (tokens, top_k)

    def sent(x, index, experts=experts):
        config = dispatch.Config(counted=True, slots=8, stores=1)
        return st.expert_dispatch(x, index, "x", num_experts=experts, config=config)

    x, index = ((tokens, d), jnp.bfloat16), (entries, jnp.int32)
    two = aot.mesh_of_gpus((2,), ("x",))
    yield "tables in the dispatch", *on_one(sent, two, [x, index])
    more = functools.partial(sent, experts=256)
    yield "tables of four devices", *on_one(more, mesh, [x, index])
    rows = (4 * tokens * top_k, d), jnp.bfloat16
    for warpgroups, totals in ((2, False), (2, True), (4, True)):

        def combined(rows, weights, positions, warpgroups=warpgroups, totals=totals):
            config = combine.Config(totals=totals, chunk=8, warpgroups=warpgroups)
            return st.expert_combine(rows, weights, positions, "x", config=config)

        name = f"combine by {warpgroups} warpgroups" + ", with totals" * totals
        yield name, *on_one(combined, mesh, [rows, (entries, jnp.float32), index])


def experts_of_a_model(programs: Callable, model: str, tokens: int) -> Iterator[Program]:
    """Some `expert_programs` on two devices."""
    mesh = aot.mesh_of_gpus((2,), ("x",))
    for name, call, shapes in programs(model, tokens):
        yield name, *on_one(call, mesh, shapes)


def dispatch_under_a_product() -> Iterator[Program]:
    """The first product of a layer of experts, and the transposed one of its backward pass."""
    mesh = aot.mesh_of_gpus((4,), ("x",))
    tokens, rows, experts = 256, 2048, 8

    def body(x, sources, sizes, rhs, *, transposed):
        return dispatch_matmul.dispatch_matmul(
            x,
            sources,
            sizes,
            rhs,
            Team.along(("x",)),
            config=dispatch_matmul.Config(),
            rhs_transposed=transposed,
            interpret=None,
        )[1]

    for transposed, width in ((False, 2048), (True, 2880)):
        rhs = (1536, width) if transposed else (width, 1536)
        shapes = [
            ((tokens, width), jnp.bfloat16),
            ((rows,), jnp.int32),
            ((experts,), jnp.int32),
            ((experts, *rhs), jnp.bfloat16),
        ]
        program = functools.partial(body, transposed=transposed)
        yield f"transposed={transposed}", *on_one(program, mesh, shapes)


def activation_in_a_product() -> Iterator[Program]:
    """The first product of a layer of experts: gated in one matrix, by itself, and, with biases and
    a matrix each, under which tokens are dispatched.
    """
    mesh = aot.mesh_of_gpus((4,), ("x",))
    tokens, rows, experts, tiles = 256, 2048, 8, dispatch_matmul.Config().tiles

    def alone(x, sizes, w_in):
        how = dict(gated=True, tiles=tiles)
        activated = Activated.of([w_in], None, swiglu, **how)
        return group_activation.activated_product(x, sizes, activated, interpret=None)

    def under(x, sources, sizes, gate, up, *biases):
        how = dict(gated=True, tiles=tiles)
        activated = Activated.of([gate, up], biases, ClampedSwiglu(), **how)
        config = dispatch_matmul.Config()
        given = x, sources, sizes, activated, Team.along(("x",))
        how = dict(config=config, rhs_transposed=False, interpret=None)
        return dispatch_matmul.dispatch_matmul(*given, **how)[1]

    sizes = ((experts,), jnp.int32)
    shapes = [((rows, 2048), jnp.bfloat16), sizes, ((experts, 2048, 1536), jnp.bfloat16)]
    yield "alone", *on_one(alone, mesh, shapes)
    shapes = [((tokens, 2880), jnp.bfloat16), ((rows,), jnp.int32), sizes]
    shapes += [((experts, 2880, 2880), jnp.bfloat16)] * 2 + [((experts, 2880), jnp.bfloat16)] * 2
    yield "dispatch under it", *on_one(under, mesh, shapes)


def combine_under_a_product() -> Iterator[Program]:
    """The last product of a layer of experts, and the sum of two of its backward pass."""
    mesh = aot.mesh_of_gpus((4,), ("x",))
    tokens, f, experts = 256, 768, 8

    def body(sizes, weights, positions, *operands, transposed):
        sides = len(operands) // 2
        return matmul_combine.matmul_combine(
            operands[:sides],
            operands[sides:],
            sizes,
            weights,
            positions,
            Team.along(("x",)),
            wire_dtype=jnp.bfloat16,
            config=matmul_combine.Config(),
            rhs_transposed=transposed,
            interpret=None,
        )

    for transposed, width, top_k, sides in ((False, 2048, 8, 1), (True, 2880, 4, 2)):
        rhs = (width, f) if transposed else (f, width)
        shapes = [
            ((experts,), jnp.int32),
            ((tokens, top_k), jnp.float32),
            ((tokens, top_k), jnp.int32),
            *[((4 * tokens * top_k, f), jnp.bfloat16)] * sides,
            *[((experts, *rhs), jnp.bfloat16)] * sides,
        ]
        program = functools.partial(body, transposed=transposed)
        yield f"transposed={transposed}", *on_one(program, mesh, shapes)


CASES: dict[str, Callable[[], Iterator[Program]]] = {
    "example of grouped_matmul": functools.partial(example, "grouped_matmul"),
    "derivatives of grouped_matmul": functools.partial(example, "grouped_matmul", derivatives=True),
    **{f"example of {name}": functools.partial(example, name) for name in EXPERTS},
    **{
        f"derivatives of {name}": functools.partial(example, name, derivatives=True)
        for name in EXPERTS
    },
    "few tokens of experts": few_tokens_of_experts,
    "many tokens of experts": many_tokens_of_experts,
    **{
        f"{what} of experts, {model}, {tokens}": functools.partial(
            experts_of_a_model, programs, model, tokens
        )
        for what, programs in (("calls", expert_programs.calls), ("layer", expert_programs.layer))
        for model in expert_programs.SIZES
        for tokens in (64, 8192)
    },
    "dispatch under a product": dispatch_under_a_product,
    "activation in a product": activation_in_a_product,
    "combine under a product": combine_under_a_product,
}
