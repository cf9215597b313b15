"""The transformer with a mixture of experts: loss and gradients are those of one device."""

from __future__ import annotations

import dataclasses

import config
import parallel
import pytest
from transformer_checks import (
    TRAINING,
    check_fused_training,
    differences,
    on_mesh,
    on_one_device,
)

SIZES = config.Sizes(
    layers=2, hidden=64, heads=8, kv_heads=4, feed_forward=24, sequence=16, experts=8, top_k=2
)
SMALLEST = config.Sizes(
    layers=1, hidden=64, heads=4, kv_heads=2, feed_forward=16, sequence=16, experts=4, top_k=2
)
FLOAT32 = config.Execution(backend="xla")


@pytest.fixture(scope="module")
def exact():
    return on_one_device(SIZES, "float32", TRAINING.batch)


@pytest.mark.slow  # Layers are compared in tests/layers, and training in test_transformer_train.py.
@pytest.mark.parametrize(
    ("dp", "tp", "remat"),
    [
        (2, 2, "elementwise"),
        (1, 1, "layer"),
        (1, 2, "layer"),
        (4, 2, "layer"),
        (1, 4, "elementwise"),
    ],
)
def test_loss_and_gradients_are_those_of_one_device(exact, dp: int, tp: int, remat: str) -> None:
    how = dataclasses.replace(FLOAT32, remat=remat)
    loss, gradients = on_mesh(dp, tp, SIZES, how, TRAINING.batch)
    assert loss == pytest.approx(exact[0], rel=1e-6)
    off = differences(gradients, exact[1])
    assert any("router" in name for name in off)
    assert max(off.values()) < 2e-5, off


def test_each_device_has_experts_of_its_own() -> None:
    shapes = parallel.weight_shapes(parallel.make_mesh(2, 2), SIZES, "float32")["blocks"]["mlp"]
    for name, whole in shapes["experts"].items():
        assert whole.sharding.shard_shape(whole.shape)[:2] == (2, SIZES.experts // 4), name
    router = shapes["router"]
    assert router.sharding.shard_shape(router.shape) == (2, SIZES.hidden, SIZES.experts)


@pytest.mark.slow
def test_training_with_fused_kernels_is_the_same_in_the_simulator() -> None:
    check_fused_training(parallel.make_mesh(1, 2), SMALLEST, "simulator")


@pytest.mark.parametrize(
    ("changes", "words"),
    [(dict(experts=4, top_k=0), "top_k=0 must be"), (dict(experts=4, top_k=5), "top_k=5 must be")],
)
def test_sizes_that_make_no_mixture_are_refused(changes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(SIZES, **changes)


def test_experts_that_the_devices_cannot_split_are_refused() -> None:
    with pytest.raises(ValueError, match="experts=8 must be a multiple of the dp=3 x tp=1"):
        SIZES.check_fits(3, 1, 3)
