"""The transformer on GPUs: loss and gradients of a step against one device, by each backend."""

from __future__ import annotations

import jax
import pytest

pytest.importorskip("flax", reason="the transformer is written in Flax")

import transformer_checks as checks
from config import Execution, Sizes
from parallel import make_mesh

pytestmark = [pytest.mark.gpu(2), pytest.mark.one_process]

SIZES = Sizes(layers=2, hidden=512, heads=8, kv_heads=4, feed_forward=1024, sequence=256)
REHEARSAL = Sizes(layers=1, hidden=32, heads=4, kv_heads=4, feed_forward=32, sequence=16)
BATCH = 2


@pytest.fixture(scope="module")
def sizes(rehearsing: bool) -> Sizes:
    return REHEARSAL if rehearsing else SIZES


@pytest.fixture(scope="module")
def exact(sizes: Sizes):
    """In float32."""
    return checks.on_one_device(sizes, "float32", BATCH)


@pytest.mark.parametrize("remat", ["elementwise", "layer"])
@pytest.mark.parametrize("attention", ["cudnn", "xla"])
@pytest.mark.parametrize("dp", [1, 2])
def test_step_is_that_of_one_device(
    exact, sizes: Sizes, rehearsing: bool, dp: int, attention: str, remat: str
) -> None:
    """Fused kernels err by no more than twice what XLA's collectives do."""
    devices = 4 if rehearsing or len(jax.devices()) >= 4 else 2
    if rehearsing and attention == "cudnn":
        pytest.skip("cuDNN needs a GPU")
    if dp == devices:
        pytest.skip("needs 4 GPUs")
    losses, off = {}, {}
    for backend in ("xla", "pallas"):
        how = Execution(backend=backend, dtype="bfloat16", attention=attention, remat=remat)
        losses[backend], gradients = checks.on_mesh(dp, devices // dp, sizes, how, BATCH)
        off[backend] = checks.differences(gradients, exact[1])
    assert abs(losses["pallas"] - exact[0]) <= 2 * abs(losses["xla"] - exact[0]) + 1e-3
    for name, allowed in off["xla"].items():
        assert 0 < off["pallas"][name] <= 2 * allowed, (name, off)


@pytest.mark.real
def test_training_is_that_of_xla(sizes: Sizes) -> None:
    checks.check_fused_training(make_mesh(1, 2), sizes, "pallas")
