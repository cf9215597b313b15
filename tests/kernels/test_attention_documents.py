"""The attention kernel with documents packed into one sequence: what tiles go through, numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import QUICKLY, dense
from attention_kernel_cases import SMALL, TOLERANCE, Simulated, check, drawn, seen
from fused_cases import mesh_of
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.distributed.simulator import SimulationError
from stretto.kernels.engine.attention import documents
from stretto.kernels.engine.attention.documents import COUNT, FIRST, LAST, PLAIN_FIRST, PLAIN_LAST
from stretto.kernels.engine.attention.order import AttentionOrder, SortedOrder
from stretto.kernels.engine.attention.visible import VisibleKeys
from stretto.kernels.fused.attention_config import Config, Sequence

SLOW = pytest.mark.slow
IN_ORDER, MIXED, FEW = "in order", "mixed", "few"


def numbers(kind: str, batch: int, tokens: int) -> np.ndarray:
    """int32 `[batch, tokens]`: documents in order, of any length; or without order."""
    rng = np.random.default_rng(2)
    found = rng.integers(-2, {IN_ORDER: 3, MIXED: 2, FEW: 0}[kind], (batch, tokens))
    return (found if kind == MIXED else np.sort(found, 1)).astype(np.int32)


def visible_to(device: int, devices: int, chunks: int, *, causal: bool) -> VisibleKeys:
    return VisibleKeys(
        device=device,
        devices=devices,
        chunks=chunks,
        queries=24,
        keys=24,
        rows=16,  # The last tile of a chunk has half of them.
        block=8,
        causal=causal,
    )


@pytest.mark.parametrize("kind", [IN_ORDER, MIXED])
@pytest.mark.parametrize(("devices", "chunks"), [(1, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("causal", [True, False])
def test_what_the_table_has_of_tiles(devices, chunks, causal, kind):
    """All blocks with a key that a query sees; none with other documents counts as plain."""
    tokens = 24 * devices * chunks
    ids, others = numbers(kind, 2, tokens), numbers(kind, 2, tokens)
    others[0] = 7  # No query of the first sequence has a key.
    mask = seen(2, tokens, tokens, causal=causal) & (ids[:, :, None] == others[:, None])
    for device in range(devices):
        walk = visible_to(device, devices, chunks, causal=causal)
        queries = [ids[:, walk.first_query(chunk, 0) :][:, :24] for chunk in range(chunks)]
        keys = [others[:, walk.first_key(segment) :][:, :24] for segment in range(walk.segments)]
        found = documents.table(
            jnp.asarray(np.stack(queries, 1).reshape(-1, 24)),
            jnp.asarray(np.concatenate(keys, 1)),
            walk,
        )
        found = np.asarray(found).reshape(2, chunks, walk.tiles_of_chunk, walk.segments, -1)
        sizes, blocks_seen = found[..., LAST] - found[..., FIRST], 0
        for batch, chunk, tile, segment in np.ndindex(found.shape[:4]):
            entry = found[batch, chunk, tile, segment]
            first = walk.first_query(chunk, tile)
            rows = min(16, 24 - tile * 16)
            for block in range(3):
                key = walk.first_key(segment) + block * 8
                window = (batch, slice(first, first + rows), slice(key, key + 8))
                within = entry[FIRST] <= block < entry[LAST]
                assert within or not mask[window].any()
                if entry[PLAIN_FIRST] <= block < entry[PLAIN_LAST]:
                    assert within and len({*ids[window[:2]], *others[batch, window[2]]}) == 1
                blocks_seen += within
            assert entry[COUNT] == sizes[batch, chunk, tile].sum()
        if kind == IN_ORDER and not causal:
            assert blocks_seen < sizes.size * 3  # Some are passed over.
        assert (sizes[0, ..., 0] == 1).all() and not sizes[0, ..., 1:].any()


@pytest.mark.parametrize(
    ("devices", "batch", "sequence", "kind", "config", "seeds"),
    [
        (1, 2, Sequence(causal=True), MIXED, SMALL, 1),
        (2, 1, Sequence(chunks=2, causal=True), IN_ORDER, SMALL, 1),
        pytest.param(2, 2, Sequence(), IN_ORDER, SMALL, 3, marks=SLOW),
        pytest.param(3, 1, Sequence(causal=True, window=100), MIXED, SMALL, 3, marks=SLOW),
        pytest.param(4, 2, Sequence(chunks=2, causal=True), FEW, SMALL, 3, marks=SLOW),
    ],
)
def test_queries_see_their_own_document(devices, batch, sequence, kind, config, seeds):
    tokens = devices * sequence.chunks * 128
    ids = numbers(kind, batch, tokens)
    operands = drawn((batch, tokens, 2, 64), (batch, tokens, 1, 64))
    mask = seen(batch, tokens, tokens, causal=sequence.causal, window=sequence.window)
    mask = mask & (ids[:, :, None] == ids[:, None])
    program = Simulated(devices, sequence, config, packed=True)
    for seed in range(seeds):
        found, report = program([*operands[:3], jnp.asarray(ids), jnp.asarray(ids)], seed)
        assert report.ok, str(report)
        check(found, operands, mask)


def test_queries_without_a_key_of_their_document():
    """Their result is 0, whatever the keys are; the first tile has no such query, the last only."""
    ids = np.repeat([[0, 0, 5, 5]], 64, 1).astype(np.int32)
    others = np.repeat([[0, 0, 0, 4]], 64, 1).astype(np.int32)
    operands = drawn((1, 256, 2, 64), (1, 256, 1, 64))
    program = Simulated(1, Sequence(), packed=True)
    (out, lse), report = program([*operands[:3], jnp.asarray(ids), jnp.asarray(others)])
    assert report.ok, str(report)
    assert not out[:, 128:].any() and np.isneginf(lse[..., 128:]).all()
    check((out, lse), operands, ids[:, :, None] == others[:, None])


@pytest.mark.parametrize("layout", ["zigzag", pytest.param("contiguous", marks=SLOW)])
def test_the_public_call_and_its_derivatives(layout):
    """By `auto`, which takes the kernel wherever it can serve."""
    operands = drawn((2, 512, 2, 64), (2, 512, 1, 64))
    ids = numbers(IN_ORDER, 2, 512)
    place = st.to_zigzag if layout == "zigzag" else lambda x, _: x
    back = st.from_zigzag if layout == "zigzag" else lambda x, _: x
    said = []

    def body(q, k, v, bar, ids):
        how = dict(causal=True, layout=layout, segment_ids=ids)
        said.append(st.explain(st.context_parallel_attention, q, k, v, "x", **how))
        out, pull = jax.vjp(
            lambda *given: st.context_parallel_attention(*given, "x", **how), q, k, v
        )
        return out, *pull(bar)

    spec = P(None, "x")
    mapped = jax.shard_map(body, mesh=mesh_of(2), in_specs=spec, out_specs=spec)
    with st.simulate(core_count=2) as report:
        given = [place(jnp.asarray(x), 2) for x in (*operands, ids)]
        program = jax.jit(mapped).lower(*given).compile(QUICKLY)
        found = [np.asarray(back(x, 2), np.float64) for x in program(*given)]
    assert report.ok and report.launches == 3, str(report)
    assert isinstance(said[0].config, Config) and "segment ids" in said[0].reason
    assert "its derivative by the kernel" in said[0].reason
    mask = seen(2, 512, 512, causal=True) & (ids[:, :, None] == ids[:, None])
    right = dense(operands, mask)
    for x, y in zip(found, (right[0], *right[2:]), strict=True):
        assert np.linalg.norm(x - y) / np.linalg.norm(y) < TOLERANCE["bfloat16"]


def test_ids_of_64_bits_are_not_the_kernels():
    q = jax.ShapeDtypeStruct((1, 512, 2, 64), "bfloat16")
    said = []

    def body(q, ids):
        how = dict(causal=True, method="fused", segment_ids=ids)
        said.append(st.explain(st.context_parallel_attention, q, q, q, "x", **how))
        return q

    spec = P(None, "x")
    with jax.enable_x64(True), st.simulate():
        mapped = jax.shard_map(body, mesh=mesh_of(2), in_specs=spec, out_specs=spec)
        jax.eval_shape(mapped, q, jax.ShapeDtypeStruct((1, 512), "int64"))
    assert "segment ids that a type of 32 bits holds, not int64" in said[0].reason


@pytest.mark.parametrize("others", ["uint32", "int32"])
def test_ids_beyond_the_signed_range(others):
    """Hashes, say: as XLA compares them, in either pass; -1 is not 2^32 - 1 of another type."""
    operands = drawn((1, 256, 2, 64), (1, 256, 1, 64))
    ids = np.repeat(np.array([[3, 2**31 + 1, 2**32 - 1]], np.uint32), [64, 128, 64], 1)

    def found(**how):
        def body(q, k, v, bar, *ids):
            named = dict(zip(("segment_ids", "kv_segment_ids"), ids, strict=True), **how)
            call = lambda *given: st.context_parallel_attention(*given, "x", **named)  # noqa: E731
            out, pull = jax.vjp(call, q, k, v)
            return out, *pull(bar)

        spec = P(None, "x")
        mapped = jax.shard_map(body, mesh=mesh_of(2), in_specs=spec, out_specs=spec)
        with jax.enable_x64(True), st.simulate(core_count=2) as report:
            given = *operands, jnp.asarray(ids), jnp.asarray(ids.astype(others))
            outs = [np.asarray(x, np.float64) for x in jax.jit(mapped)(*given)]
        return outs, report.launches

    right, _ = found(backend="xla", method="gather")
    outs, launches = found()
    assert bool(launches) == (others == "uint32")
    for x, y in zip(outs, right, strict=True):
        assert np.linalg.norm(x - y) <= TOLERANCE["bfloat16"] * np.linalg.norm(y)


def with_another(entry, change):
    """The table with another entry, for a bug."""
    right = documents.table

    def wrong(*given):
        found = right(*given)
        return found.at[..., entry].set(change(found))

    return wrong


@pytest.mark.usefixtures("traces_apart")
@pytest.mark.parametrize(
    ("entry", "change"),
    [
        # A block that is to be masked counts as plain.
        (PLAIN_LAST, lambda table: table[..., LAST]),
        pytest.param(FIRST, lambda table: jnp.minimum(table[..., FIRST] + 1, 1), marks=SLOW),
        # Queries are released too early, or never.
        pytest.param(COUNT, lambda table: table[..., COUNT] - 1, marks=SLOW),
        pytest.param(COUNT, lambda table: table[..., COUNT] + 1, marks=SLOW),
    ],
)
def test_wrong_tables_are_found(monkeypatch, entry, change):
    """By a number, or by the simulator."""
    monkeypatch.setattr(documents, "table", with_another(entry, change))
    ids = np.sort(np.random.default_rng(0).integers(0, 3, (1, 512)), 1).astype(np.int32)
    operands = drawn((1, 512, 2, 64), (1, 512, 1, 64))
    program = Simulated(1, Sequence(), packed=True, cores=1)
    with pytest.raises((AssertionError, SimulationError)):
        found, report = program([*operands[:3], jnp.asarray(ids), jnp.asarray(ids)])
        assert report.ok
        check(found, operands, ids[:, :, None] == ids[:, None])


@pytest.mark.parametrize(("num_blocks", "most"), [(5, 1.05), (132, 1.2)])
def test_tiles_sorted_by_their_work_are_shared_evenly(num_blocks, most):
    """Every tile once; no block has much more work than the mean."""
    heads, steps, tiles = 8, 2, 32
    plain = AttentionOrder(
        batch=1, chunks=steps, tiles=tiles, kv_heads=2, group=4, num_blocks=num_blocks
    )
    work = np.random.default_rng(0).integers(1, 65, steps * tiles)
    places = jnp.asarray(np.argsort(-work, kind="stable"))
    order = SortedOrder(tiles=plain, of_step=tiles, heads=heads, place=lambda at: places[at])
    found = [order.locate(index) for index in range(order.count())]
    numbers = [(int(tile.step), int(tile.m), int(tile.n)) for tile in found]
    assert len(set(numbers)) == len(numbers) == heads * steps * tiles
    shares = np.zeros(num_blocks)
    for index, (step, m, _) in enumerate(numbers):
        shares[index % num_blocks] += work[step * tiles + m]
    assert shares.max() < most * shares.mean()
