"""The machine and how to time on it: its clocks, what else runs there, what it can do at best."""
