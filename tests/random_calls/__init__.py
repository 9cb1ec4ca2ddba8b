"""Random calls of the whole public API: drawn, computed between guard pages, held to FP64, made smaller."""
