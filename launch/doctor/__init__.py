"""``stretto doctor``: what this machine can do, and what is wrong with it.

Each topic has a file: a collector that asks the machine, and judges that turn what it said into
findings and need no machine to be tested.
"""
