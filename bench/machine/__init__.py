"""The machine, and timing on it: clocks, other programs, ceilings."""
