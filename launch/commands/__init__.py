"""The commands of `stretto` that start programs, each with its options."""
