"""The simulator gives the numbers that GPUs give, to one rounding, for every fused kernel."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

pytestmark = pytest.mark.gpu(2)

ROWS, COLUMNS, WHOLE = P("x", None), P(None, "x"), P(None, None)
# Operation: sharding of its operands and of its result.
OPERATIONS = {
    "all_gather_matmul": ((ROWS, COLUMNS), COLUMNS),
    "matmul_reduce_scatter": ((COLUMNS, ROWS), ROWS),
    "matmul_all_reduce": ((COLUMNS, ROWS), WHOLE),
    "all_gather": ((ROWS,), WHOLE),
    "reduce_scatter": ((ROWS,), ROWS),
    "all_reduce": ((ROWS,), WHOLE),
}


def result(name: str, count: int, **settings: str) -> np.ndarray:
    """What operation `name` gives on `count` devices for operands that depend on nothing else."""
    import stretto as st

    in_specs, out_spec = OPERATIONS[name]
    m, k, n = 64 * count, 128 * count, 128 * count
    shapes = [(m, k), (k, n)] if "matmul" in name else [(m * count, n)]
    operands = [jax.random.normal(jax.random.key(i), s, jnp.bfloat16) for i, s in enumerate(shapes)]
    operation = functools.partial(getattr(st, name), axis_name="x", backend="pallas", **settings)
    mesh = Mesh(np.array(jax.devices()[:count]), ("x",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(
        operation, mesh=mesh, in_specs=in_specs, out_specs=out_spec, check_vma=False
    )
    return np.asarray(jax.jit(mapped)(*operands), np.float32)


SIMULATED = """
import importlib.util, sys
import jax
import numpy as np
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", int(sys.argv[3]))
spec = importlib.util.spec_from_file_location("agrees", sys.argv[1])
agrees = importlib.util.module_from_spec(spec)
spec.loader.exec_module(agrees)
import stretto as st
with st.simulate(seed=1, core_count=4) as report:
    np.save(sys.argv[4], agrees.result(sys.argv[2], int(sys.argv[3])))
assert report.launches, "nothing was simulated"
"""


def simulated(name: str, count: int, path: Path) -> np.ndarray:
    """The same in the simulator, in a process that sees no GPU."""
    command = [sys.executable, "-c", SIMULATED, __file__, name, str(count), str(path)]
    subprocess.run(command, check=True, timeout=250)
    return np.load(path)


@pytest.mark.parametrize("name", OPERATIONS)
def test_same_numbers(name: str, tmp_path: Path) -> None:
    count = 4 if len(jax.devices()) >= 4 else 2
    want = simulated(name, count, tmp_path / "simulated.npy")
    got = result(name, count)
    # The order of a sum may differ, so a result may be rounded the other way.
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=2**-8 * np.abs(want).max())
