"""Times, figures, the machine, and the files that hold them."""
