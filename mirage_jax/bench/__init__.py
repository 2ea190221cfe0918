"""The benchmark: programs with the limits of the hardware, timing that means something, and suites."""
