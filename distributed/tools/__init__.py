"""Tools for kernel authors: compiling without a GPU, and profiles."""
