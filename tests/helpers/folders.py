"""What scripts need that tests run as processes of their own: where they lie, and variables."""

from __future__ import annotations

import os
from pathlib import Path

HELPERS = Path(__file__).parent
ROOT = HELPERS.parents[1]
TRANSFORMER = ROOT / "examples" / "transformer"
# A script that the launcher starts does not find the modules beside it.
_PATH = [*map(str, (HELPERS, TRANSFORMER)), *filter(None, [os.environ.get("PYTHONPATH")])]
PYTHONPATH = {"PYTHONPATH": os.pathsep.join(_PATH)}
# For the programs of a process that a test starts, what the tests' own have (tests/conftest.py).
QUICKLY_COMPILED = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
