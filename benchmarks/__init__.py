"""Sweeps, statistics, plots and reports."""
