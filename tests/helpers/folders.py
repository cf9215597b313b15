"""Where the files that tests run as scripts lie, and what such a script needs to find them."""

from __future__ import annotations

import os
from pathlib import Path

HELPERS = Path(__file__).parent
ROOT = HELPERS.parents[1]
TRANSFORMER = ROOT / "examples" / "transformer"
# A script that the launcher starts does not find the modules beside it.
_PATH = [*map(str, (HELPERS, TRANSFORMER)), *filter(None, [os.environ.get("PYTHONPATH")])]
PYTHONPATH = {"PYTHONPATH": os.pathsep.join(_PATH)}
