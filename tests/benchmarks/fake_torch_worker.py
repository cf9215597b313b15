"""Stands in for the interpreter with PyTorch: answers as `torch_worker.py` would, or fails.

Started as `python fake_torch_worker.py ...` by a wrapper that `test_bench_sweep.py` writes. What it
does is told by the environment variable FAKE: "works", "dies", "errs" or "never".
"""

import json
import os
import sys
import time

if os.environ["FAKE"] == "never":
    print(json.dumps({"error": "RuntimeError: no NCCL\nmore"}), flush=True)
    sys.exit()
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "prepare":
        if os.environ["FAKE"] == "errs":
            answer = {"error": "RuntimeError: out of memory\nTraceback ..."}
        else:
            answer = {"id": 7}
    elif request["do"] == "visit":
        if os.environ["FAKE"] == "dies":
            print("Segmentation fault (not really)", file=sys.stderr)
            sys.exit(1)
        if os.environ["FAKE"] == "hangs":
            time.sleep(60)
        answer = {"samples": [100.0 + index for index in range(request["samples"])]}
    else:
        answer = {}
    print(json.dumps(answer), flush=True)
