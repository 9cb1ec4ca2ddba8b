"""The compiled core: attention on the CPU in C++, with libraries for each instruction set."""
