"""What was found out: times, figures, the machine, and the files that hold them."""
