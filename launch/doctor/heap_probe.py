"""Makes the memory that kernels keep between launches, on all GPUs; prints JSON.

Run as a program of its own (``python -m stretto.launch.doctor.heap_probe``), like ``peer_probe``.
"""

import ctypes
import json
import sys

from stretto.distributed.devices import cuda
from stretto.distributed.memory import heap_memory


def main() -> int:
    """Print the number of GPUs whose memory all of them reach, or the error, as JSON."""
    count = ctypes.c_int()
    try:
        cuda.call("cuInit", 0)
        cuda.call("cuDeviceGetCount", ctypes.byref(count))
        heap_memory.map_slots(range(count.value))
    except OSError as error:
        print(json.dumps({"error": str(error)}))
        return 1
    print(json.dumps({"gpus": count.value}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
