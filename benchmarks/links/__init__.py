"""Links between devices, measured: latency and bandwidth within nodes and between them."""
