"""A real engine beside the simulation: start it, ask it, read its counters, compare."""
