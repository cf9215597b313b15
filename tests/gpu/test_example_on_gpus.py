"""The example on GPUs, where `auto` takes fused kernels: it learns what one GPU learns."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest

pytestmark = [pytest.mark.gpu(2), pytest.mark.real, pytest.mark.one_process]

pytest.importorskip("sklearn", reason="the example's data comes with scikit-learn")
SCRIPT = Path(__file__).parents[2] / "examples" / "tensor_parallel_mlp.py"
EPOCHS = 10


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tensor_parallel_mlp", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_mesh(example: ModuleType, mesh: jax.sharding.Mesh, dtype: str, backend: str) -> Callable:
    logits = functools.partial(example.sharded_logits, dtype=dtype, backend=backend)
    return example.on_mesh(mesh, logits)


def train(example: ModuleType, devices: int, backend: str) -> list:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("x",))
    logits = on_mesh(example, mesh, "bfloat16", backend)
    weights, data = example.shard(mesh, example.first_weights(), example.load_data())
    return list(example.train(logits, weights, data, EPOCHS))


def train_on_one(example: ModuleType, dtype: str) -> list:
    logits = functools.partial(example.plain_logits, dtype=dtype)
    return list(example.train(logits, example.first_weights(), example.load_data(), EPOCHS))


@pytest.mark.filterwarnings("ignore:no tuned table")  # of a GPU that has none yet
@pytest.mark.parametrize("backend", ["auto", "pallas", "xla"])
def test_training_on_gpus_is_that_of_one(example: ModuleType, backend: str) -> None:
    with jax.default_matmul_precision("highest"):
        exact = train_on_one(example, "float32")
    plain = train_on_one(example, "bfloat16")
    ours = train(example, 4 if len(jax.devices()) >= 4 else 2, backend)
    off = max(abs(a.loss - b.loss) for a, b in zip(ours, exact, strict=True))
    allowed = max(abs(a.loss - b.loss) for a, b in zip(plain, exact, strict=True))
    assert off <= 2 * allowed + 1e-3
    assert ours[-1].accuracy > 0.95
