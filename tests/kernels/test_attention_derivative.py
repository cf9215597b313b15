"""The kernel of attention's derivative: which queries see a block, numbers, what it refuses."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from attention_cases import QUICKLY, dense
from attention_derivative_cases import ERROR, OnOne, relative
from attention_kernel_cases import SMALL, drawn, seen
from fused_cases import mesh_of
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.kernels.attention.layouts import Span
from stretto.kernels.engine.attention import derivative_shares
from stretto.kernels.engine.attention.derivative_shares import BlockOrder
from stretto.kernels.engine.attention.seeing import Seeing
from stretto.kernels.engine.attention.visible import VisibleKeys
from stretto.kernels.engine.hopper.attention.derivative_config import DerivativeTiles
from stretto.kernels.fused import attention_derivative, attention_derivative_moves
from stretto.kernels.fused.attention_config import Config, Sequence
from stretto.kernels.fused.attention_derivative_moves import Sizes

SLOW = pytest.mark.slow
PLAIN, TURNS = DerivativeTiles(), DerivativeTiles(turns=True)
ORDERED = DerivativeTiles(ordered=True)

# (devices, layout, causal, window)
WALKS = [
    (1, "contiguous", True, None),
    (2, "contiguous", False, None),
    (3, "contiguous", True, 20),
    (2, "zigzag", True, None),
    (4, "zigzag", True, 20),
]


@pytest.mark.parametrize(("devices", "layout", "causal", "window"), WALKS)
def test_blocks_are_seen_by_the_tiles_that_see_them(devices, layout, causal, window):
    """And a tile counts those before it as it sees them, one after another."""
    chunks = Span(layout, devices, 0).chunks
    for device, distance in itertools.product(range(devices), range(devices)):
        visible = VisibleKeys(
            device=device,
            devices=devices,
            chunks=chunks,
            queries=24,
            keys=16,
            rows=8,
            block=8,
            causal=causal,
            window=window,
        )
        if causal:
            visible = dataclasses.replace(visible, keys=24)
        seeing = Seeing(visible=visible, distance=distance)
        count = dict.fromkeys(itertools.product(range(chunks), range(3)), 0)
        for chunk, block in itertools.product(range(chunks), range(visible.blocks_of_chunk)):
            first_key, total = seeing.first_key(chunk, block), 0
            for own in range(chunks):
                first, last = seeing.tiles(first_key, own)
                for tile in range(3):
                    query = visible.first_query(own, tile)
                    begin, end = visible.blocks(query, seeing.segment(chunk))
                    assert (begin <= block < end) == (first <= tile < last)
                    if first <= tile < last:
                        assert seeing.before(query, chunk, block) == count[own, tile]
                        count[own, tile] += 1
                        total += 1
            assert seeing.count(chunk, block) == total
        for (own, tile), number in count.items():
            assert seeing.is_seen(visible.first_query(own, tile)) == (number > 0)


@pytest.mark.parametrize(("tokens", "heads"), [(8192, (64, 8)), (8192, (32, 32))])
@pytest.mark.parametrize("distance", [0, 1])
def test_a_table_gives_all_blocks_equal_work_in_the_order_of_keys(tokens, heads, distance):
    """A block waits for those of smaller numbers, which every block of the grid takes before."""
    chunk = tokens // 2
    visible = VisibleKeys(
        device=0, devices=2, chunks=2, queries=chunk, keys=chunk, rows=64, block=128, causal=True
    )
    seeing = Seeing(visible=visible, distance=distance)
    order = BlockOrder(
        batch=1,
        chunks=2,
        blocks=chunk // 128,
        kv_heads=heads[1],
        group=heads[0] // heads[1],
        num_blocks=132,
    )
    table = derivative_shares.table(seeing, order)
    places: dict[tuple, int] = {}
    busy = []
    for device in range(2):
        own = dataclasses.replace(visible, device=device)
        of_device = dataclasses.replace(seeing, visible=own)
        shares = [column[1 : column[0] + 1] for column in table[device].T]
        assert sorted(np.concatenate(shares)) == list(range(order.num_tiles))
        for share in shares:
            tiles = [order.tile(int(number)) for number in share]
            busy.append(sum(of_device.count(tile.step, tile.m) for tile in tiles))
            for tile in tiles:
                key = tile.n, tile.step
                assert places.get((*key, id(share)), -1) < tile.m
                places[*key, id(share)] = tile.m
        assert max(busy) < 1.3 * np.mean(busy)
        busy.clear()


@pytest.mark.parametrize(
    ("tokens", "sequence", "distance", "parts"),
    [
        # The first device sees none of these keys, and the second one all.
        (512, Sequence(causal=True), 1, 4),
        # Parts share the work out better, but hardly.
        (32768, Sequence(chunks=2, causal=True), 1, 1),
    ],
)
def test_heads_are_taken_apart_where_the_busiest_device_gains(
    monkeypatch, tokens, sequence, distance, parts
):
    monkeypatch.setattr(
        attention_derivative_moves, "num_blocks_for", lambda num_tiles: min(num_tiles, 132)
    )
    q, k = (jax.ShapeDtypeStruct((1, tokens, heads, 128), "bfloat16") for heads in (64, 8))
    sizes = Sizes.of(q, k, sequence, DerivativeTiles(), devices=2, distance=distance)
    assert sizes.parts == parts


@pytest.mark.parametrize(
    ("tokens", "keys", "heads", "dim", "sequence", "config", "dtype"),
    [
        (256, 256, (2, 1), 128, Sequence(causal=True), PLAIN, "bfloat16"),
        (384, 384, (2, 1), 128, Sequence(causal=True), ORDERED, "bfloat16"),
        (256, 256, (2, 2), 64, Sequence(causal=True, window=100), TURNS, "bfloat16"),
        (128, 256, (4, 1), 64, Sequence(), DerivativeTiles(parts=2), "bfloat16"),
        pytest.param(64, 256, (4, 2), 128, Sequence(), TURNS, "float16", marks=SLOW),
        pytest.param(384, 128, (2, 1), 64, Sequence(), PLAIN, "float16", marks=SLOW),
        pytest.param(
            512, 512, (2, 2), 128, Sequence(causal=True, window=150), PLAIN, "bfloat16", marks=SLOW
        ),
    ],
)
def test_on_one_device(tokens, keys, heads, dim, sequence, config, dtype):
    operands = drawn((1, tokens, heads[0], dim), (1, keys, heads[1], dim), dtype, size=3.0)
    mask = seen(1, tokens, keys, causal=sequence.causal, window=sequence.window)
    program = OnOne(sequence, config)
    bits = []
    for seed in range(2):
        errors, found, report = program(operands, mask, seed)
        assert report.ok, str(report)
        assert max(errors) < ERROR[dtype]
        bits.append([np.asarray(x).tobytes() for x in found])
    assert bits[0] == bits[1] or not config.ordered, "sums are added in another order"


@pytest.mark.parametrize("config", [PLAIN, ORDERED])
def test_rows_that_see_no_key_get_and_give_nothing(config):
    """Their logsumexp is minus infinity, as of queries without keys on any device."""
    q, k, v, bar = drawn((1, 128, 1, 64), (1, 128, 1, 64))
    rows = jax.numpy.full((1, 1, 128), -np.inf, "float32"), jax.numpy.zeros((1, 1, 128), "float32")
    with st.simulate(core_count=2) as report:
        found = attention_derivative.derive(
            q, k, v, bar, *rows, Sequence(), scale=0.125, config=config
        )
    assert report.ok and not any(np.asarray(x, np.float32).any() for x in found)


@pytest.mark.parametrize(
    ("devices", "sequence", "heads", "config"),
    [
        (2, Sequence(chunks=2, causal=True), (2, 1), ORDERED),
        pytest.param(2, Sequence(chunks=2, causal=True), (2, 1), PLAIN, marks=SLOW),
        pytest.param(3, Sequence(causal=True, window=100), (2, 2), ORDERED, marks=SLOW),
        pytest.param(4, Sequence(chunks=2, causal=True), (2, 1), PLAIN, marks=SLOW),
        pytest.param(2, Sequence(), (2, 2), PLAIN, marks=SLOW),
    ],
)
def test_keys_of_every_device_of_a_sequence(devices, sequence, heads, config):
    """The derivatives by all devices' keys, one device's queries after another, add up."""
    tokens = devices * sequence.chunks * 128
    operands = drawn((1, tokens, heads[0], 64), (1, tokens, heads[1], 64))
    mask = seen(1, tokens, tokens, causal=sequence.causal, window=sequence.window)
    out, lse, *right = dense(operands, mask)
    cut = (lambda x: st.to_zigzag(x, devices)) if sequence.chunks > 1 else lambda x: x
    back = (lambda x: st.from_zigzag(x, devices)) if sequence.chunks > 1 else lambda x: x
    delta = (out * np.asarray(operands[3], np.float64)).sum(-1)
    q, k, v, bar, lse, delta = (
        cut(jax.numpy.asarray(x)) for x in (*operands, *(x.astype("float32") for x in (lse, delta)))
    )
    each = tokens // devices
    sums = [np.zeros(x.shape) for x in (q, k, v)]
    for distance in range(devices):

        def body(device, *given, distance=distance):
            return attention_derivative.derive(
                *(*given, sequence),
                scale=0.125,
                config=config,
                device=device,
                devices=devices,
                distance=distance,
            )

        program = jax.jit(body)
        for device in range(devices):
            own = slice(device * each, (device + 1) * each)
            other = (device + distance) % devices
            of_other = slice(other * each, (other + 1) * each)
            rows = (x[:, own].transpose(0, 2, 1) for x in (lse, delta))
            given = q[:, own], k[:, of_other], v[:, of_other], bar[:, own], *rows
            with st.simulate(core_count=2) as report:
                found = jax.block_until_ready(program(jax.numpy.int32(device), *given))
            assert report.ok, str(report)
            for total, place, x in zip(sums, (own, of_other, of_other), found, strict=True):
                total[:, place] += np.asarray(x, np.float64)
    errors = relative([np.asarray(back(jax.numpy.asarray(x, "float32"))) for x in sums], right)
    assert max(errors) < ERROR["bfloat16"]


@pytest.mark.parametrize(
    ("logsumexp", "config"),
    [
        (False, SMALL),
        pytest.param(True, SMALL, marks=SLOW),
        pytest.param(False, dataclasses.replace(SMALL, keep=False), marks=SLOW),
    ],
)
def test_the_public_call(logsumexp, config):
    """The kernel of the result, and one launch for each device's keys; what `explain` says of it.

    The derivative of the logsumexp, which cuDNN does not have, too.
    """
    operands = drawn((1, 512, 2, 64), (1, 512, 1, 64))
    said = []

    def body(q, k, v, bar):
        how = dict(causal=True, layout="zigzag", config=config, return_logsumexp=logsumexp)
        said.append(st.explain(st.context_parallel_attention, q, k, v, "x", **how))
        out, pull = jax.vjp(lambda *x: st.context_parallel_attention(*x, "x", **how), q, k, v)
        bars = (bar, 0 * out[1]) if logsumexp else bar
        return pull(bars)

    spec = P(None, "x")
    mapped = jax.shard_map(body, mesh=mesh_of(2), in_specs=spec, out_specs=spec)
    with st.simulate(core_count=2) as report:
        given = [st.to_zigzag(x, 2) for x in operands]
        found = jax.jit(mapped).lower(*given).compile(QUICKLY)(*given)
        found = [np.asarray(st.from_zigzag(x, 2), np.float64) for x in found]
    assert report.ok and report.launches == 3, str(report)
    right = dense(operands, seen(1, 512, 512, causal=True))[2:]
    assert max(relative(found, right)) < 1e-2
    assert "its derivative by the kernel" in said[0].reason


def explained(tokens, config):
    found = []

    def body(q):
        how = dict(causal=True, method="fused", config=config)
        found.append(st.explain(st.context_parallel_attention, q, q, q, "x", **how))
        return q

    spec = P(None, "x")
    mapped = jax.shard_map(body, mesh=mesh_of(2), in_specs=spec, out_specs=spec)
    with st.simulate():
        jax.eval_shape(mapped, jax.ShapeDtypeStruct((1, tokens, 2, 64), "bfloat16"))
    return found[0].reason


def test_explain_says_what_derives_and_why():
    by_cudnn = dataclasses.replace(SMALL, backward="cudnn")
    assert "not by the kernel: the configuration has backward='cudnn'" in explained(512, by_cudnn)
    few = explained(128, SMALL)
    assert "not by the kernel: tokens=64 of a device must be a multiple of 128" in few


def test_refusals():
    with pytest.raises(ValueError, match="backward='both' must be one of cudnn, kernel"):
        Config(backward="both").check()
    q = jax.ShapeDtypeStruct((1, 192, 1, 64), "bfloat16")
    rows = jax.ShapeDtypeStruct((1, 1, 192), "float32")

    def derive(q, rows, scale):
        return attention_derivative.derive(
            q, q, q, q, rows, rows, Sequence(), scale=scale, config=PLAIN
        )

    with pytest.raises(NotImplementedError, match="tokens=192 of a device must be a multiple"):
        jax.eval_shape(lambda q, rows: derive(q, rows, 1.0), q, rows)
    q = jax.ShapeDtypeStruct((1, 256, 1, 64), "bfloat16")
    with pytest.raises(ValueError, match="parts=3 must divide the 1 heads of a head of keys"):
        config = DerivativeTiles(parts=3)
        attention_derivative.derive(*(q, q, q, q, rows, rows), Sequence(), scale=1.0, config=config)
    with pytest.raises(ValueError, match="parts=0 must be at least 1"):
        DerivativeTiles(parts=0).check()
    with pytest.raises(NotImplementedError, match=r"scale=0\.0 must be above 0"):
        jax.eval_shape(lambda q, rows: derive(q, rows, 0.0), q, rows)
