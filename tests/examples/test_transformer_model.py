"""The transformer's loss and gradients are those of one device, on every mesh; what it sends."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter

import collectives
import config
import jax
import numpy as np
import parallel
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from sample import sample
from step import initial_state
from transformer_checks import (
    TRAINING,
    check_fused_training,
    differences,
    on_mesh,
    on_one_device,
    put,
    random_bytes,
    random_weights,
    train,
)

SIZES = config.Sizes(layers=2, hidden=64, heads=8, kv_heads=4, feed_forward=48, sequence=16)
SMALLEST = config.Sizes(layers=1, hidden=32, heads=4, kv_heads=2, feed_forward=16, sequence=16)
FLOAT32 = config.Execution(backend="xla")
MESHES = [(1, 1), (1, 2), (2, 2), (1, 4)]


@pytest.fixture(scope="module")
def exact():
    return on_one_device(SIZES, "float32", TRAINING.batch)


def test_loss_and_gradients_are_those_of_one_device(exact) -> None:
    loss, gradients = on_mesh(2, 2, SIZES, FLOAT32, TRAINING.batch)
    assert loss == pytest.approx(exact[0], rel=1e-6)
    off = differences(gradients, exact[1])
    assert max(off.values()) < 2e-5, off


@pytest.mark.parametrize(
    ("dp", "cp", "tp"),
    [(2, 2, 2), *(pytest.param(*mesh, marks=pytest.mark.slow) for mesh in [(1, 4, 1), (1, 2, 4)])],
)
def test_split_sequences_have_the_loss_and_gradients_of_one_device(exact, dp, cp, tp) -> None:
    loss, gradients = on_mesh(dp, tp, SIZES, FLOAT32, TRAINING.batch, cp=cp)
    assert loss == pytest.approx(exact[0], rel=1e-6)
    off = differences(gradients, exact[1])
    assert max(off.values()) < 2e-5, off


@pytest.mark.slow
def test_split_sequences_are_sampled_alike() -> None:
    texts = []
    for cp in (1, 2):
        mesh = parallel.make_mesh(2, 1, cp)
        weights = put(mesh, SMALLEST, random_weights(SMALLEST))
        texts.append(sample(mesh, SMALLEST, FLOAT32, weights, prompt=b"def x", count=20))
    assert texts[0] == texts[1] and len(texts[0]) == 25


def test_a_sequence_that_has_no_chunks_for_all_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence=18 must be a multiple of 4: each of cp=2"):
        dataclasses.replace(SMALLEST, sequence=18).check_fits(1, 1, 1, cp=2)


@pytest.mark.slow
def test_computing_layers_again_changes_nothing(exact) -> None:
    how = dataclasses.replace(FLOAT32, remat="layer")
    _, gradients = on_mesh(1, 2, SIZES, how, TRAINING.batch)
    assert max(differences(gradients, exact[1]).values()) < 2e-5


@pytest.mark.parametrize(("remat", "again"), [("elementwise", 0), ("layer", 1)])
def test_what_the_backward_pass_computes_again(
    monkeypatch: pytest.MonkeyPatch, remat: str, again: int
) -> None:
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91300)
    monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda _: True)
    how = config.Execution(backend="xla", dtype="bfloat16", attention="cudnn", remat=remat)
    mesh, (_, weights, _) = parallel.make_mesh(1, 2), parallel.structure(SIZES)
    rows = jax.ShapeDtypeStruct((SIZES.sequence,), np.int32)
    forward, both = (
        Counter(re.findall(r"(\w+)\[", str(jax.make_jaxpr(function)(weights, rows, rows))))
        for make in (parallel.loss, parallel.loss_and_gradients)
        for function in [make(mesh, SIZES, how)]
    )
    # A product has a derivative by each operand, but for the table of bytes, which none precedes.
    assert forward["dot_general"] == 9
    assert both["dot_general"] == 3 * 9 - 1 + 5 * again  # query, key, value, gate and up
    assert both["dot_product_attention_fwd_wrapper"] == 1 + again


@pytest.mark.slow  # Its layers are simulated in tests/layers, and the other example whole.
@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 2), (1, 4)])
def test_fused_kernels_give_the_same_in_the_simulator(dp: int, tp: int) -> None:
    sizes = dataclasses.replace(SMALLEST, kv_heads=max(2, tp))
    loss, gradients = on_one_device(sizes, "float32", dp)
    losses, off = {}, {}
    for backend in ("xla", "simulator"):
        how = config.Execution(backend=backend, dtype="bfloat16")
        losses[backend], ours = on_mesh(dp, tp, sizes, how, dp)
        off[backend] = differences(ours, gradients)
    assert abs(losses["simulator"] - loss) <= 2 * abs(losses["xla"] - loss) + 1e-3
    for name, allowed in off["xla"].items():
        assert 0 < off["simulator"][name] <= 2 * allowed, name


@functools.cache
def compiled_step(dp: int, tp: int):
    return collectives.compiled_step(parallel.make_mesh(dp, tp), SIZES, TRAINING, FLOAT32)


@functools.cache
def losses_of_training(dp: int, tp: int) -> list[float]:
    return train(compiled_step(dp, tp), parallel.make_mesh(dp, tp), SIZES, TRAINING)


@pytest.mark.slow  # Jobs are compared in test_transformer_train.py, and gradients above.
@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (1, 2), (1, 4)])
def test_training_is_the_same_on_every_mesh(dp: int, tp: int) -> None:
    plain = losses_of_training(1, 1)
    assert losses_of_training(dp, tp) == pytest.approx(plain, rel=1e-4)
    assert np.mean(plain[-10:]) < plain[0] - 1.5  # it learns


@pytest.mark.slow
def test_training_with_fused_kernels_is_the_same_in_the_simulator() -> None:
    check_fused_training(parallel.make_mesh(1, 2), SMALLEST, "simulator")


def test_weights_are_the_same_on_every_mesh_and_split() -> None:
    whole, split = (initial_state(parallel.make_mesh(1, tp), SIZES, TRAINING) for tp in (1, 4))
    jax.tree.map(np.testing.assert_array_equal, whole.weights, split.weights)
    blocks = split.weights["blocks"]
    split_at = {"query": 2, "key": 2, "value": 2, "out": 1, "gate": 2, "up": 2, "down": 1}
    for name, layer in {**blocks["attention"], **blocks["mlp"]}.items():
        kernel, dim = layer["kernel"], split_at[name]
        shard = kernel.addressable_shards[0].data.shape
        assert shard[dim] == kernel.shape[dim] // 4, name
    moments = jax.tree.leaves(split.optimizer)
    assert sum(x.addressable_shards[0].data.size < x.size for x in moments) == 2 * 7


def count(dp: int, tp: int) -> Counter:
    counts: Counter = Counter()
    found = collectives.collectives(compiled_step(dp, tp).as_text())
    for (where, kind, over, _), number in found.items():
        counts[where, kind, over] += number
    return counts


IN_A_LAYER = Counter(
    {
        ("layer, forward", "all-gather", "tp"): 2,
        ("layer, forward", "reduce-scatter", "tp"): 2,
        ("layer, backward", "all-gather", "tp"): 2,
        ("layer, backward", "reduce-scatter", "tp"): 2,
    }
)


ONCE = [
    ("once", "all-reduce", "dp"),
    ("once", "all-reduce", "dp, tp"),
    ("once", "all-reduce", "tp"),
]


@pytest.mark.parametrize(
    ("dp", "tp", "expected"), [(1, 1, Counter()), (2, 2, IN_A_LAYER + Counter(ONCE))]
)
def test_step_has_no_collective_that_is_not_needed(dp: int, tp: int, expected: Counter) -> None:
    assert count(dp, tp) == expected


def test_logits_depend_on_nothing_later_nor_on_other_sequences() -> None:
    mesh = parallel.make_mesh(2, 2)
    tokens, _ = random_bytes(SIZES, TRAINING.batch)
    others = tokens.copy()
    others[1, 7] = (others[1, 7] + 1) % 256
    function = jax.jit(parallel.logits(mesh, SIZES, FLOAT32))
    weights = put(mesh, SIZES, random_weights(SIZES))
    before, after = (
        np.asarray(function(weights, parallel.put_rows(mesh, x))) for x in (tokens, others)
    )
    assert before.shape == (tokens.size, config.VOCABULARY) and before.dtype == np.float32
    changed = np.flatnonzero(np.abs(before - after).max(axis=1) > 1e-5)
    first = SIZES.sequence + 7
    assert changed.tolist() == list(range(first, 2 * SIZES.sequence))


@pytest.mark.parametrize(
    ("dp", "tp", "batch", "words"),
    [
        (1, 3, 4, "kv_heads=4 must be a multiple of tp=3"),
        (3, 1, 4, "batch=4 must be a multiple of dp=3"),
    ],
)
def test_what_a_mesh_cannot_split_is_refused(dp: int, tp: int, batch: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SIZES.check_fits(dp, tp, batch)


def test_more_devices_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="dp=3 x tp=3 needs 9 devices and there are 8"):
        parallel.make_mesh(3, 3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"heads": 7}, "hidden=64"), ({"kv_heads": 3}, "kv_heads=3"), ({"hidden": 8}, "even")],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(SIZES, **changes)
