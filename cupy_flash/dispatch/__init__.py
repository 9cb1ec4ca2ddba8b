"""From a described call to what computes it: remembered, planned, loaded and run."""
