"""The example gives the same numbers on any number of devices and processes, and learns."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest
from folders import QUICKLY_COMPILED

import stretto as st

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "tensor_parallel_mlp.py"
TOLERANCE = 1e-4  # of the loss, in float32


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


def train(example: ModuleType, devices: int, epochs: int, dtype: str = "float32") -> list:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("x",))
    logits = on_mesh(example, mesh, dtype, "auto")
    weights, data = example.shard(mesh, example.first_weights(), example.load_data())
    return list(example.train(logits, weights, data, epochs))


def train_on_one(example: ModuleType, epochs: int, dtype: str) -> list:
    logits = functools.partial(example.plain_logits, dtype=dtype)
    return list(example.train(logits, example.first_weights(), example.load_data(), epochs))


@pytest.fixture(scope="module")
def on_one(example: ModuleType) -> list:
    return train_on_one(example, 10, "float32")


@pytest.mark.parametrize(
    "devices", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4)), 2, 8]
)
def test_training_is_that_of_one_device(example: ModuleType, on_one: list, devices: int) -> None:
    for ours, plain in zip(train(example, devices, 10), on_one, strict=True):
        assert ours.loss == pytest.approx(plain.loss, abs=TOLERANCE)
        assert ours.accuracy == pytest.approx(plain.accuracy, abs=1 / example.TEST)


@pytest.mark.slow
def test_bfloat16_training_is_close_to_float32(example: ModuleType, on_one: list) -> None:
    ours = train(example, 4, 10, "bfloat16")
    plain = train_on_one(example, 10, "bfloat16")
    off = max(abs(a.loss - b.loss) for a, b in zip(ours, on_one, strict=True))
    allowed = max(abs(a.loss - b.loss) for a, b in zip(plain, on_one, strict=True))
    assert 0 < off <= 2 * allowed
    assert ours[-1].accuracy > 0.95


def test_fused_kernels_train_the_same_in_the_simulator(example: ModuleType) -> None:
    data = example.load_data()
    data = data._replace(images=data.images[:2], labels=data.labels[:2])  # two batches
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    logits = on_mesh(example, mesh, "bfloat16", "simulator")
    weights, shards = example.shard(mesh, example.first_weights(), data)
    (ours,) = example.train(logits, weights, shards, 1)

    def expected(dtype: str) -> float:
        plain = functools.partial(example.plain_logits, dtype=dtype)
        return next(example.train(plain, example.first_weights(), data, 1)).loss

    exact = expected("float32")
    assert abs(ours.loss - exact) <= 2 * abs(expected("bfloat16") - exact) + 1e-3
    assert ours.loss != exact


def test_in_a_simulation_kernels_are_simulated(example: ModuleType, capsys) -> None:
    """Operands have a type that they take, where no other is asked for."""
    with st.simulate():
        example.main(["--epochs", "0"])
    assert "bfloat16 on 8 x cpu: simulator, because a simulation" in capsys.readouterr().out


def test_weights_and_images_are_split(example: ModuleType) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",))
    weights, data = example.shard(mesh, example.first_weights(), example.load_data())
    assert weights.w1.addressable_shards[0].data.shape == (example.PIXELS, example.HIDDEN // 4)
    assert weights.w2.addressable_shards[0].data.shape == (example.HIDDEN // 4, example.CLASSES)
    assert data.images.addressable_shards[0].data.shape[1] == example.BATCH // 4


def run(processes: int, *options: str) -> list[tuple[float, float, float]]:
    """(loss, accuracy in percent, difference) per epoch, as `stretto run` shows them."""
    command = [sys.executable, "-m", "stretto.launch", "run", "-n", str(processes)]
    done = subprocess.run(
        [*command, str(SCRIPT), *options],
        env=os.environ | QUICKLY_COMPILED,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"processes: {processes}\n" in done.stdout
    rows = re.findall(r"(\d+)  ([\d.]+)  +([\d.]+)%  +(-?[\d.e+-]+)$", done.stdout, re.MULTILINE)
    assert [int(row[0]) for row in rows] == list(range(1, len(rows) + 1))
    return [(float(loss), float(accuracy), float(off)) for _, loss, accuracy, off in rows]


@pytest.mark.slow
def test_simulated_job_of_several_processes_is_refused() -> None:
    command = [sys.executable, "-m", "stretto.launch", "run", "-n", "2", str(SCRIPT)]
    done = subprocess.run(
        [*command, "--backend", "simulator"], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "--processes-per node" in done.stderr


@pytest.mark.parametrize(
    "processes", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4)), 2]
)
def test_job_learns_and_gives_the_same_numbers(
    example: ModuleType, on_one: list, processes: int
) -> None:
    rows = run(processes, "--epochs", "10", "--dtype", "float32")
    assert len(rows) == 10
    assert rows[-1][1] >= 95.0
    assert max(abs(off) for _, _, off in rows) < TOLERANCE
    for (loss, accuracy, _), plain in zip(rows, on_one, strict=True):
        assert loss == pytest.approx(plain.loss, abs=TOLERANCE)
        assert accuracy / 100 == pytest.approx(plain.accuracy, abs=1.5 / example.TEST)
