"""The script that runs JAX's test files, on a small file of that kind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "run.py"
FILE = """
import unittest
import jax
import jax.numpy as jnp
import numpy as np
from jax._src import test_util as jtu
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

X = jnp.arange(128.0)


def run(body, *scratch):
    return plgpu.kernel(body, out_type=jax.typeof(X), scratch_types=scratch)(X)


def double(x_ref, out_ref):
    out_ref[...] = 2 * x_ref[...]


class FakeTest(unittest.TestCase, jtu.CudaArchSpecificTest):
    def test_right(self):
        self.assertTrue(jtu.is_device_cuda())
        np.testing.assert_array_equal(run(double), 2 * X)

    def test_wrong_numbers(self):
        np.testing.assert_array_equal(run(double), 3 * X)

    def test_wrong_numbers_ptx(self):
        np.testing.assert_array_equal(run(double), 3 * X)

    def test_ptx(self):
        run(double)
        self.assertIn("mul.f32", "")

    def test_reported(self):
        def body(x_ref, out_ref, smem):
            smem[...] = x_ref[...]
            plgpu.copy_smem_to_gmem(smem, out_ref)
            plgpu.wait_smem_to_gmem(0)

        np.testing.assert_array_equal(run(body, plgpu.SMEM((128,), jnp.float32)), X)

    def test_refused(self):
        @plgpu.inline_mgpu()
        def nothing(_): ...

        def body(x_ref, out_ref):
            nothing()
            out_ref[...] = x_ref[...]

        run(body)

    def test_taken(self):
        with self.assertRaises(ValueError):
            jax.block_until_ready(run(double))

    def test_other_words(self):
        def body(x_ref, out_ref, sem):
            pl.semaphore_wait(sem)

        with self.assertRaisesRegex(Exception, "a hang"):
            jax.block_until_ready(run(body, plgpu.SemaphoreType.REGULAR))

    def test_blackwell(self):
        self.skip_unless_tcgen05()
        self.assertTrue(jtu.is_cuda_compute_capability_at_least("10.0"))
        tensor_memory = plgpu.TMEM((128, 32), jnp.float32)
        run(lambda x_ref, out_ref, tensor: double(x_ref, out_ref), tensor_memory)


class FakeWGTest(FakeTest):
    LOWERING_SEMANTICS = plgpu.LoweringSemantics.Warpgroup
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pallas")
    (folder / "fake_gpu_test.py").write_text(FILE)
    command = [sys.executable, SCRIPT, folder, "--files", "fake_gpu_test.py"]
    done = subprocess.run(
        [*command, "--out", folder / "out.jsonl"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_each_outcome_has_its_class(ran):
    folder, printed = ran
    header, _, row = [line for line in printed.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (header, row)]
    assert dict(zip(*cells, strict=True)) == {
        "file": "`fake_gpu_test`", "cases": "8", "right": "1", "right, with a report": "1",
        "refused": "1", "in other words": "1", "taken": "1", "of JAX itself": "1",
        "of another JAX": "", "wrong": "2",
    }  # fmt: skip
    outcomes = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert [o["test"] for o in outcomes if o["skipped"]] == ["FakeTest.test_blackwell"]


def test_what_needs_a_look_is_named(ran):
    printed = ran[1]
    assert "- 1 x FakeTest.test_reported: [uncommitted store]" in printed
    assert "- 1 x FakeTest.test_wrong_numbers: " in printed
    assert "- 1 x only a GPU can run the device code of inline_mgpu" in printed


def test_parts_make_one_table(ran):
    folder, whole = ran
    lines = (folder / "out.jsonl").read_text().splitlines(keepends=True)
    for part in range(2):
        (folder / f"{part}.jsonl").write_text("".join(lines[part::2]))
    command = [sys.executable, SCRIPT, "--read", folder / "0.jsonl", folder / "1.jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.splitlines()) == sorted(whole.splitlines())


def test_a_b200_runs_what_is_for_blackwell(ran):
    folder, _ = ran
    out = folder / "b200.jsonl"
    command = [sys.executable, SCRIPT, folder, "--files", "fake_gpu_test.py", "--target", "b200"]
    command += ["--only", "test_blackwell", "--out", out]
    subprocess.run(command, capture_output=True, text=True, check=True)
    (outcome,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert (outcome["skipped"], outcome["error"]) == ("", "")


def test_missing_folder_is_told():
    done = subprocess.run([sys.executable, SCRIPT, "nowhere"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "give the tests/pallas folder of JAX's sources" in done.stderr
