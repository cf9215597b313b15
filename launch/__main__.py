"""``python -m stretto.launch`` is the ``stretto`` command."""

import sys

from stretto.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
