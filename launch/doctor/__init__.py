"""``stretto doctor``: what this machine can do, and what is wrong with it.

Each topic has a file: a collector that queries the machine, and judges that turn its answers into
findings and need no machine to be tested.
"""
