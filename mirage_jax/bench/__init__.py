"""The benchmark: programs with the limits of the hardware, and suites."""
