"""`python -m stretto.benchmarks ARGS`: the same as `stretto bench ARGS`."""

import sys

from stretto.benchmarks.command import main

sys.exit(main(sys.argv[1:]))
