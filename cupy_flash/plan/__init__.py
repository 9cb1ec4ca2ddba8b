"""The planner: `choose`, and the kernel families that it chooses from."""
