"""Score and mask functions: traced to a graph once, differentiated, and written as C++ or bytecode."""
