"""Models in place of a measurement: least times from counts and published rates, tiles that might be."""
