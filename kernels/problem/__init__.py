"""What a call is: its operands' checks, its epilogue, its reference through XLA."""
