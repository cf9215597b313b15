"""The kernel of attention's derivative with packed documents: its table, numbers, seeded bugs."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import QUICKLY, dense
from attention_derivative_cases import ERROR, OnOne, relative
from attention_kernel_cases import SMALL, drawn, seen
from fused_cases import mesh_of
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.distributed.simulator import SimulationError
from stretto.kernels.engine.attention import derivative_documents, documents
from stretto.kernels.engine.attention.documents import COUNT, FIRST, LAST, PLAIN_FIRST, PLAIN_LAST
from stretto.kernels.engine.attention.seeing import Seeing
from stretto.kernels.engine.attention.visible import VisibleKeys
from stretto.kernels.engine.hopper.attention.derivative_config import DerivativeTiles
from stretto.kernels.fused import attention_derivative
from stretto.kernels.fused.attention_config import Sequence

SLOW = pytest.mark.slow


def numbers(batch: int, tokens: int, *, mixed: bool = False, most: int = 3) -> np.ndarray:
    """int32 `[batch, tokens]`: documents in order, of any length; or without order."""
    found = np.random.default_rng(2).integers(0, 2 if mixed else most, (batch, tokens))
    return (found if mixed else np.sort(found, 1)).astype(np.int32)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("devices", "chunks"), [(1, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("causal", [True, False])
def test_what_the_table_has_of_blocks(devices, chunks, causal, mixed):
    """All tiles with a query that sees a key; none with other documents counts as plain."""
    tokens = 24 * devices * chunks
    ids, others = numbers(2, tokens, mixed=mixed), numbers(2, tokens, mixed=mixed)
    others[0] = 7  # No key of the first sequence has a query.
    mask = seen(2, tokens, tokens, causal=causal) & (ids[:, :, None] == others[:, None])
    passed_over = 0
    for device, distance in itertools.product(range(devices), range(devices)):
        visible = VisibleKeys(
            device=device,
            devices=devices,
            chunks=chunks,
            queries=24,
            keys=24,
            rows=8,
            block=12,
            causal=causal,
        )
        seeing = Seeing(visible=visible, distance=distance)
        queries = [ids[:, visible.first_query(chunk, 0) :][:, :24] for chunk in range(chunks)]
        keys = [others[:, seeing.first_key(chunk, 0) :][:, :24] for chunk in range(chunks)]
        of_both = (jnp.asarray(np.stack(x, 1).reshape(-1, 24)) for x in (queries, keys))
        found = np.asarray(derivative_documents.table(*of_both, seeing))
        found = found.reshape(2, chunks, 2, chunks, -1)
        for batch, chunk, block, own in np.ndindex(found.shape[:4]):
            entry, key = found[batch, chunk, block, own], seeing.first_key(chunk, block)
            for tile in range(3):
                query = visible.first_query(own, tile)
                window = batch, slice(query, query + 8), slice(key, key + 12)
                within = entry[FIRST] <= tile < entry[LAST]
                assert within or not mask[window].any()
                if entry[PLAIN_FIRST] <= tile < entry[PLAIN_LAST]:
                    assert within and len({*ids[window[:2]], *others[batch, window[2]]}) == 1
                passed_over += not within
            sizes = found[batch, chunk, block, :, LAST] - found[batch, chunk, block, :, FIRST]
            assert entry[COUNT] == sizes.sum() and (batch or not entry[COUNT])
    assert passed_over


@pytest.mark.parametrize(
    ("tokens", "keys", "heads", "dim", "sequence", "mixed"),
    [
        (384, 384, (2, 1), 128, Sequence(causal=True), False),
        (256, 256, (2, 2), 64, Sequence(causal=True, window=100), True),
        pytest.param(128, 256, (4, 1), 64, Sequence(), False, marks=SLOW),
        pytest.param(192, 384, (4, 2), 128, Sequence(), True, marks=SLOW),
    ],
)
def test_on_one_device(tokens, keys, heads, dim, sequence, mixed):
    """Of two sequences; some queries have no key, and some keys no query."""
    operands = drawn((2, tokens, heads[0], dim), (2, keys, heads[1], dim), size=3.0)
    ids = numbers(2, tokens, mixed=mixed)
    others = ids if tokens == keys else numbers(2, keys, mixed=mixed, most=2)
    mask = seen(2, tokens, keys, causal=sequence.causal, window=sequence.window)
    mask = mask & (ids[:, :, None] == others[:, None])
    program = OnOne(sequence, DerivativeTiles())
    for seed in range(2):
        errors, _, report = program([*operands, jnp.asarray(ids), jnp.asarray(others)], mask, seed)
        assert report.ok, str(report)
        assert max(errors) < ERROR["bfloat16"]


def test_keys_without_a_query_of_their_document_get_nothing():
    """And queries without a key of theirs."""
    operands = drawn((1, 256, 2, 64), (1, 256, 1, 64))
    ids = np.repeat([[0, 0, 5, 5]], 64, 1).astype(np.int32)
    others = np.repeat([[0, 0, 4, 4]], 64, 1).astype(np.int32)
    mask = ids[:, :, None] == others[:, None]
    program = OnOne(Sequence(), DerivativeTiles())
    errors, found, report = program([*operands, jnp.asarray(ids), jnp.asarray(others)], mask)
    assert report.ok and max(errors) < ERROR["bfloat16"]
    assert not any(np.asarray(x[:, 128:], np.float32).any() for x in found)


@pytest.mark.parametrize(
    ("devices", "layout", "causal", "mixed", "config"),
    [
        (2, "zigzag", True, False, SMALL),
        pytest.param(2, "contiguous", False, True, SMALL, marks=SLOW),
        pytest.param(4, "zigzag", True, False, dataclasses.replace(SMALL, keep=False), marks=SLOW),
    ],
)
def test_the_public_call(devices, layout, causal, mixed, config):
    """One launch for the result, and one for the derivatives by each device's keys."""
    tokens = 256 * devices
    operands = drawn((1, tokens, 2, 64), (1, tokens, 1, 64))
    ids = numbers(1, tokens, mixed=mixed)
    said = []

    def body(q, k, v, bar, ids):
        how = dict(causal=causal, layout=layout, config=config, segment_ids=ids)
        said.append(st.explain(st.context_parallel_attention, q, k, v, "x", **how))
        _, pull = jax.vjp(lambda *x: st.context_parallel_attention(*x, "x", **how), q, k, v)
        return pull(bar)

    place = st.to_zigzag if layout == "zigzag" else lambda x, _: x
    back = st.from_zigzag if layout == "zigzag" else lambda x, _: x
    spec = P(None, "x")
    mapped = jax.shard_map(body, mesh=mesh_of(devices), in_specs=spec, out_specs=spec)
    with st.simulate(core_count=2) as report:
        given = [place(jnp.asarray(x), devices) for x in (*operands, ids)]
        found = jax.jit(mapped).lower(*given).compile(QUICKLY)(*given)
        found = [np.asarray(back(x, devices), np.float64) for x in found]
    assert report.ok and report.launches == 1 + devices, str(report)
    mask = seen(1, tokens, tokens, causal=causal) & (ids[:, :, None] == ids[:, None])
    assert max(relative(found, dense(operands, mask)[2:])) < 1e-2
    assert "its derivative by the kernel" in said[0].reason


def with_another(entry, change):
    """The table with another entry, for a bug."""
    right = derivative_documents.table

    def wrong(*given):
        found = right(*given)
        return found.at[..., entry].set(change(found))

    return wrong


def a_place_twice(right):
    """The places in the order of work, one of them in place of another."""
    return lambda table: right(table).at[1].set(right(table)[0])


@pytest.mark.usefixtures("traces_apart")
@pytest.mark.parametrize(
    ("module", "name", "wrong"),
    [
        # A tile that is to be masked counts as plain.
        (
            derivative_documents,
            "table",
            with_another(PLAIN_LAST, lambda table: table[..., LAST]),
        ),
        pytest.param(
            derivative_documents,
            "table",
            with_another(FIRST, lambda table: jnp.minimum(table[..., FIRST] + 1, 1)),
            marks=SLOW,
        ),
        pytest.param(
            derivative_documents,
            "table",
            with_another(LAST, lambda table: jnp.maximum(table[..., LAST] - 1, 0)),
            marks=SLOW,
        ),
        (documents, "most_work_first", a_place_twice(documents.most_work_first)),
    ],
)
def test_wrong_tables_are_found(monkeypatch, module, name, wrong):
    """By a number, or by the simulator."""
    monkeypatch.setattr(module, name, wrong)
    ids = np.sort(np.random.default_rng(0).integers(0, 3, (1, 512)), 1).astype(np.int32)
    operands = drawn((1, 512, 2, 64), (1, 512, 1, 64))
    program = OnOne(Sequence(), DerivativeTiles(), cores=1)
    with pytest.raises((AssertionError, SimulationError)):
        mask = ids[:, :, None] == ids[:, None]
        errors, _, report = program([*operands, jnp.asarray(ids), jnp.asarray(ids)], mask)
        assert report.ok and max(errors) < ERROR["bfloat16"]


def test_blocks_in_turn_take_no_documents():
    q = jax.ShapeDtypeStruct((1, 256, 1, 64), "bfloat16")
    rows = jax.ShapeDtypeStruct((1, 1, 256), "float32")
    ids = jax.ShapeDtypeStruct((1, 256), "int32")
    with pytest.raises(ValueError, match="ordered=True takes no documents"):
        attention_derivative.derive(
            *(q, q, q, q, rows, rows),
            Sequence(),
            scale=1.0,
            config=DerivativeTiles(ordered=True),
            segments=(ids, ids),
        )
