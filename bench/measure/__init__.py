"""Measurements: cases compared with peers, with errors, as rows of a file."""
