"""JAX's devices, read in a separate process: JAX may abort, and would keep the GPUs.

Run as ``python -m stretto.launch.doctor.jax_probe``; prints one line of JSON.
"""

import json


def main() -> None:
    """Start JAX, list its devices, and add two numbers on each."""
    import jax
    import jax.numpy as jnp

    devices = jax.local_devices()
    sums = [int(jax.device_put(jnp.int32(1), device) + 1) for device in devices]
    seen = {
        "platform": devices[0].platform,
        "kinds": [device.device_kind for device in devices],
        "adds": all(total == 2 for total in sums),
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
