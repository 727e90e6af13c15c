"""Weights for the records of a pool, such that the weighted pool looks like the traffic."""
