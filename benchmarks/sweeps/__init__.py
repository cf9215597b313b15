"""Lists of cases: expanded, planned, run, saved and resumed."""
