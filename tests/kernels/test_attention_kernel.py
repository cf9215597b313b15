"""The attention kernel: which keys a tile sees, numbers on one and several devices, derivatives."""

from __future__ import annotations

import dataclasses
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import QUICKLY, dense
from attention_kernel_cases import SMALL, TOLERANCE, Simulated, check, drawn, seen
from fused_cases import mesh_of
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.distributed.errors import BackendUnavailableError
from stretto.kernels.attention.layouts import Span
from stretto.kernels.engine.attention import even_shares
from stretto.kernels.engine.attention.order import AttentionOrder
from stretto.kernels.engine.attention.visible import VisibleKeys
from stretto.kernels.engine.hopper.attention.config import TALL, AttentionTiles
from stretto.kernels.fused import attention
from stretto.kernels.fused.attention_config import Config, Sequence
from stretto.kernels.operations import attention_examples as examples
from stretto.kernels.operations import attention_fused

# (devices, layout, causal, window)
WALKS = [
    (1, "contiguous", True, None),
    (2, "contiguous", False, None),
    (3, "contiguous", True, 20),
    (2, "zigzag", True, None),
    (4, "zigzag", True, None),
    (4, "zigzag", True, 20),
]


def visible_to(device, devices, layout, causal, window):
    chunks = Span(layout, devices, 0).chunks
    return VisibleKeys(
        device=device,
        devices=devices,
        chunks=chunks,
        queries=24,
        keys=24,
        rows=16,  # The last tile of a chunk has half of them.
        block=8,
        causal=causal,
        window=window,
    )


@pytest.mark.parametrize(("devices", "layout", "causal", "window"), WALKS)
def test_tiles_go_through_the_blocks_that_they_see(devices, layout, causal, window):
    """And no others; where no mask is needed all rows see all keys of the block."""
    for device in range(devices):
        walk = visible_to(device, devices, layout, causal, window)
        tokens = walk.chunks * 24
        queries = np.asarray(Span(layout, devices, device).positions(tokens))
        for chunk, tile in itertools.product(range(walk.chunks), range(walk.tiles_of_chunk)):
            first = walk.first_query(chunk, tile)
            assert first == queries[chunk * 24 + tile * 16]
            rows = np.arange(first, first + 16)
            count = 0
            for segment in range(walk.segments):
                holder = (device + walk.step(segment)) % devices
                keys = np.asarray(Span(layout, devices, holder).positions(tokens))
                keys = keys[walk.chunk(segment) * 24 :][:24]
                assert walk.first_key(segment) == keys[0]
                of_pairs = rows[:, None] - keys
                whole = (of_pairs >= 0) | (not causal)
                if window is not None:
                    whole &= of_pairs < window
                blocks = whole.reshape(16, 3, 8)
                rows_left = min(16, 24 - tile * 16)
                begin, end = walk.blocks(first, segment)
                count += end - begin
                found = [begin <= block < end for block in range(3)]
                assert found == blocks[:rows_left].any((0, 2)).tolist()
                for block in range(begin, end):
                    hidden = not blocks[:, block].all()
                    assert walk.needs_mask(first, 16, keys[0] + block * 8) == hidden
            assert walk.count(first) == count > 0
        for segment in range(walk.segments):
            ranges = [
                walk.blocks(walk.first_query(chunk, tile), segment)
                for chunk, tile in itertools.product(range(walk.chunks), range(walk.tiles_of_chunk))
            ]
            assert walk.is_seen(segment) == any(begin < end for begin, end in ranges)


def test_every_tile_once_heads_of_keys_after_each_other_and_most_keys_first():
    order = AttentionOrder(batch=2, chunks=2, tiles=3, kv_heads=2, group=2, num_blocks=5)
    tiles = [order.locate(index) for index in range(order.num_tiles)]
    places = {(tile.step, tile.m, tile.n) for tile in tiles}
    assert len(places) == len(tiles) == 2 * 2 * 3 * 4
    straight = AttentionOrder(batch=2, chunks=2, tiles=3, kv_heads=2, group=2, num_blocks=1000)
    tiles = [straight.locate(index) for index in range(straight.num_tiles)]
    keys = [(tile.step // 2, tile.n // 2) for tile in tiles]
    assert keys == sorted(keys)
    first = [(tile.step % 2, tile.m) for tile in tiles[:12]]
    assert first == sorted(first, reverse=True)


@pytest.mark.parametrize(("tokens", "heads"), [(2048, (64, 8)), (8192, (32, 32))])
@pytest.mark.parametrize("device", [0, 1])
def test_a_table_gives_all_blocks_equal_work(tokens, heads, device):
    """Every tile once; nearly all of them by heads of keys, as these arrive."""
    chunk = tokens // 2
    visible = VisibleKeys(
        device=0, devices=2, chunks=2, queries=chunk, keys=chunk, rows=128, block=128, causal=True
    )
    group = heads[0] // heads[1]
    order = AttentionOrder(
        batch=1, chunks=2, tiles=chunk // 128, kv_heads=heads[1], group=group, num_blocks=132
    )
    table = even_shares.table(visible, order)
    assert table.shape[::2] == (2, 132) and not table[:, -1].any()
    shares = [column[1 : column[0] + 1] for column in table[device].T]
    assert sorted(np.concatenate(shares)) == list(range(order.num_tiles))
    own = dataclasses.replace(visible, device=device)

    def work(number):
        tile = order.tile(int(number))
        return own.count(own.first_query(tile.step, tile.m))

    busy = [sum(map(work, share)) for share in shares]
    assert max(busy) < 1.03 * np.mean(busy)
    ordered = (order.num_tiles - 132) // order.together * order.together
    for share in shares:
        assert (np.diff(share[share < ordered]) > 0).all()


def on_one(operands, config=SMALL, **sequence):
    with st.simulate(core_count=2) as report:
        found = jax.jit(
            lambda q, k, v: attention.attend(
                q, k, v, None, Sequence(**sequence), scale=q.shape[-1] ** -0.5, config=config
            )
        )(*operands[:3])
        found = [np.asarray(x, np.float64) for x in jax.block_until_ready(found)]
    assert report.ok, str(report)
    return found


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("tokens", "keys", "heads", "dim", "how", "size"),
    [
        # A tile of two warpgroups, and one with queries for the first of them only.
        (192, 192, (2, 1), 64, dict(causal=True, window=70), 100.0),
        pytest.param(64, 256, (4, 2), 128, {}, 1.0, marks=SLOW),
        pytest.param(256, 256, (2, 2), 128, dict(causal=True), 1.0, marks=SLOW),
    ],
)
def test_on_one_device(tokens, keys, heads, dim, how, size):
    operands = drawn((1, tokens, heads[0], dim), (1, keys, heads[1], dim), size=size)
    found = on_one(operands, **how)
    check(found, operands, seen(1, tokens, keys, **how))


@pytest.mark.parametrize(
    ("size", "dtype", "how"),
    [
        (300.0, "bfloat16", dict(causal=True)),
        pytest.param(30.0, "float16", dict(causal=True), marks=SLOW),
        pytest.param(3000.0, "bfloat16", dict(causal=True, window=100), marks=SLOW),
        pytest.param(1.0, "bfloat16", {}, marks=SLOW),
    ],
)
def test_scores_that_grow_along_the_keys(size, dtype, how):
    """So that weights overflow, block after block, and rows are scaled anew."""
    q, k, v, bar = drawn((1, 256, 2, 64), (1, 256, 1, 64), dtype, size)
    growing = jnp.linspace(0.1, 1.0, 256, dtype=k.dtype)[:, None, None]
    operands = [abs(q), k * growing, v, bar]
    found = on_one(operands, **how)
    check(found, operands, seen(1, 256, 256, **how))


def test_rows_whose_scores_are_all_minus_infinity():
    """As those that see no key: nothing, in place of what is no number."""
    q, k, v, _ = drawn((1, 64, 1, 64), (1, 64, 1, 64))
    q, k = q.at[:, 5].set(1e30), -abs(k) - 1e30
    out, lse = on_one([q, k, v])
    assert not out[:, 5].any() and np.isneginf(lse[..., 5]).all()
    assert np.isfinite(out).all()


def test_a_row_of_nan_is_not_one_without_keys():
    q, k, v, _ = drawn((1, 64, 1, 64), (1, 64, 1, 64))
    out, lse = on_one([q.at[0, 5, 0, 0].set(jnp.nan), k, v])
    rows = np.arange(64) == 5
    assert (np.isnan(lse[0, 0]) == rows).all()
    assert (np.isnan(out[0, :, 0]) == rows[:, None]).all()


@pytest.mark.parametrize(
    ("dim", "tiles", "scale", "error", "words"),
    [
        (128, TALL, 1.0, ValueError, "do not have the registers for heads of dim=128"),
        (128, AttentionTiles(num_stages=3), 1.0, ValueError, "bytes of shared memory"),
        (64, AttentionTiles(), 0.0, NotImplementedError, "scale=0.0 must be above 0"),
        (96, AttentionTiles(), 1.0, NotImplementedError, "heads of size 64 and 128, not 96"),
    ],
)
def test_refusals_of_the_kernel_itself(dim, tiles, scale, error, words):
    q = jax.ShapeDtypeStruct((1, 256, 1, dim), "bfloat16")
    config = Config(tiles=tiles)
    with pytest.raises(error, match=words):
        jax.eval_shape(
            lambda q: attention.attend(q, q, q, None, Sequence(), scale=scale, config=config), q
        )


@pytest.mark.parametrize(
    ("dim", "masking", "devices", "expected"),
    [
        (128, examples.ZIGZAG, 2, (2, 2)),
        (128, examples.FULL, 1, (2, 2)),
        (64, examples.CONTIGUOUS, 2, (2, 4)),
    ],
)
def test_defaults_are_those_that_were_measured_to_be_fastest(dim, masking, devices, expected):
    problem = types.SimpleNamespace(sizes=dict(dim=dim, masking=masking), devices=devices)
    tiles = attention_fused.default(problem).tiles
    assert (tiles.warpgroups, tiles.num_stages) == expected


@SLOW
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_three_warpgroups(dtype):
    operands = drawn((2, 256, 2, 64), (2, 256, 2, 64), dtype)
    found = on_one(operands, Config(tiles=TALL), causal=True)
    check(found, operands, seen(2, 256, 256, causal=True))


@pytest.mark.parametrize(
    ("devices", "batch", "heads", "sequence", "config", "seeds"),
    [
        (2, 1, (2, 1), Sequence(chunks=2, causal=True), SMALL, 1),
        pytest.param(4, 1, (2, 2), Sequence(chunks=2, causal=True), SMALL, 3, marks=SLOW),
        pytest.param(3, 2, (4, 2), Sequence(causal=True, window=100), SMALL, 3, marks=SLOW),
        pytest.param(2, 2, (2, 2), Sequence(), SMALL, 3, marks=SLOW),
    ],
)
def test_keys_of_peers(devices, batch, heads, sequence, config, seeds):
    tokens = devices * sequence.chunks * 64
    operands = drawn((batch, tokens, heads[0], 64), (batch, tokens, heads[1], 64))
    program = Simulated(devices, sequence, config)
    mask = seen(batch, tokens, tokens, causal=sequence.causal, window=sequence.window)
    for seed in range(seeds):
        found, report = program(operands[:3], seed)
        assert report.ok, str(report)
        check(found, operands, mask)


@pytest.mark.parametrize(
    ("devices", "sequence", "chunks"),
    [
        (3, Sequence(causal=True), 0 + 1 + 2),
        pytest.param(3, Sequence(chunks=2, causal=True), 4 + 3 + 2, marks=SLOW),
        # The last key of the device before, at the most.
        pytest.param(4, Sequence(causal=True, window=2), 0 + 1 + 1 + 1, marks=SLOW),
        pytest.param(2, Sequence(), 1 + 1, marks=SLOW),
    ],
)
def test_only_chunks_that_are_seen_are_sent(devices, sequence, chunks):
    """Of 64 keys and values each, of 64 numbers of 2 bytes."""
    tokens = devices * sequence.chunks * 64
    operands = drawn((1, tokens, 1, 64), (1, tokens, 1, 64))
    found, report = Simulated(devices, sequence)(operands[:3])
    assert report.ok, str(report)
    check(found, operands, seen(1, tokens, tokens, causal=sequence.causal, window=sequence.window))
    assert report.statistics.remote_bytes == chunks * 2 * 64 * 64 * 2


@SLOW
def test_other_lengths_of_keys():
    operands = drawn((1, 128, 2, 64), (1, 256, 1, 64), "float16")
    found, report = Simulated(2, Sequence())(operands[:3])
    assert report.ok, str(report)
    check(found, operands, seen(1, 128, 256))


@pytest.mark.parametrize(
    ("config", "transfers"), [(SMALL, 1), (dataclasses.replace(SMALL, keep=False), 2)]
)
def test_the_public_call_and_its_derivatives(config, transfers):
    """Of which the kernel makes the first; and what `explain` says of it.

    Where the peers' keys are kept, only their derivatives are sent besides.
    """
    q, k, v, bar = operands = drawn((1, 256, 2, 64), (1, 256, 1, 64))
    said = []

    def body(q, k, v, bar):
        how = dict(causal=True, layout="zigzag", config=config)
        said.append(st.explain(st.context_parallel_attention, q, k, v, "x", **how))
        kept = jax.checkpoint(
            lambda *given: st.context_parallel_attention(*given, "x", **how),
            policy=jax.checkpoint_policies.save_only_these_names("attention"),
        )
        out, pull = jax.vjp(kept, q, k, v)
        return out, *pull(bar)

    spec = P(None, "x")
    mapped = jax.shard_map(body, mesh=mesh_of(2), in_specs=spec, out_specs=spec)
    with st.simulate(core_count=2) as report:
        lowered = jax.jit(mapped).lower(*(st.to_zigzag(x, 2) for x in operands))
        assert lowered.as_text().count("stablehlo.collective_permute") == transfers
        program = lowered.compile(QUICKLY)
        found = program(*(st.to_zigzag(x, 2) for x in (q, k, v, bar)))
        found = [np.asarray(st.from_zigzag(x, 2), np.float64) for x in found]
    assert report.ok and report.launches == 1, str(report)
    right = dense(operands, seen(1, 256, 256, causal=True))
    for x, y in zip(found, (right[0], *right[2:]), strict=True):
        error = np.linalg.norm(x - y) / np.linalg.norm(y)
        assert error < TOLERANCE["bfloat16"]
    assert said[0].backend == "simulator" and said[0].config == config
    assert "it was asked for; its derivative by jax.lax" in said[0].reason


def explained(q, k, **options):
    found = []

    def body(q, k, v):
        how = dict(causal=True, method="fused") | options
        found.append(st.explain(st.context_parallel_attention, q, k, v, "x", **how))
        return q

    spec = P(None, "x")
    mapped = jax.shard_map(body, mesh=mesh_of(2), in_specs=spec, out_specs=spec)
    q, k = (jax.ShapeDtypeStruct(*x) for x in (q, k))
    jax.eval_shape(mapped, q, k, k)
    return found[0]


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "words"),
    [
        ((1, 512, 2, 64), "float32", {}, "takes bfloat16 and float16, not float32"),
        ((1, 512, 2, 96), "bfloat16", {}, "heads of size 64 and 128, not 96"),
        ((1, 256, 2, 64), "bfloat16", dict(layout="zigzag"), "kv_tokens=128 of a device"),
        ((1, 192, 2, 64), "bfloat16", {}, "tokens=96 of a device must be a multiple of 64"),
        ((1, 512, 2, 64), "bfloat16", dict(scale=-1.0), "a finite scale above 0, not -1.0"),
    ],
)
def test_what_the_kernel_does_not_take(shape, dtype, options, words):
    """Another method then serves, unless the kernel was demanded."""
    found = explained((shape, dtype), (shape, dtype), **options)
    assert found.backend == "xla" and words in found.reason
    assert "'gather' serves in its place" in found.reason
    with pytest.raises(BackendUnavailableError, match="cannot serve this call"):
        explained((shape, dtype), (shape, dtype), backend="simulator", **options)


def test_only_hopper_has_it():
    shape = ((1, 512, 2, 64), "bfloat16")
    with st.simulate(target="b200"):
        assert "built for Hopper" in explained(shape, shape, backend="auto").reason


def test_auto_does_not_take_it():
    shape = ((1, 512, 2, 64), "bfloat16")
    with st.simulate():
        found = explained(shape, shape, method="auto")
    assert "no tuned table has 'fused'" in found.reason and not isinstance(found.config, Config)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Config(tiles=AttentionTiles(warpgroups=4)), "warpgroups=4 must be 2 or 3"),
        (Config(tiles=AttentionTiles(tile_k=96)), "tile_k=96 must be 64 or 128"),
        (Config(tiles=AttentionTiles(num_stages=1)), "num_stages=1 must be at least 2"),
        (Config(pull_slots=1), "pull_slots=1 must be at least 2"),
        (Config(pull_rows=48), "pull_rows=48 must divide tile_k=128"),
        (Config(tiles=TALL), "do not have the registers for heads of dim=128"),
        (Config(tiles=AttentionTiles(num_stages=3)), "bytes of shared memory"),
        (Config(pull_rows=64, pull_slots=2), "bytes of shared memory"),  # Seen on H200s.
    ],
)
def test_configurations_that_cannot_be_built(config, words):
    shape = ((1, 512, 2, 128), "bfloat16")
    with st.simulate(), pytest.raises(ValueError, match=words):
        explained(shape, shape, config=config)
