"""The tests of other libraries, run through their names in this one."""
