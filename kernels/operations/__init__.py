"""The public operations, and their derivatives."""
