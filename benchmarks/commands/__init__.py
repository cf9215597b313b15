"""The command lines: bench, show, compare, document, tune."""
