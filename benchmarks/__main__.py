"""`python -m stretto.benchmarks ARGS`: the same as `stretto bench ARGS`."""

import sys

from stretto.benchmarks.commands.bench import main

sys.exit(main(sys.argv[1:]))
