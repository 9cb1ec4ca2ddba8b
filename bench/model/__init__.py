"""Models in place of measurements: lower bounds of times from counts and rates, and candidate tiles."""
