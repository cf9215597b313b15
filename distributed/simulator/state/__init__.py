"""The parts of a simulated machine: memory, barriers, clocks, copies, and their checks."""
