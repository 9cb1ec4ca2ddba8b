"""A user's score function as a graph: traced once, differentiated, and written as C."""
