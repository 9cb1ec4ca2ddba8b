"""From a described call to its backend: cached or planned, loaded, and run."""
