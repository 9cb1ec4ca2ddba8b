"""The compiled core: attention on the CPU in C++, one small library for each instruction set."""
