"""A measurement: cases beside peers, with their errors, as rows of a file."""
