"""Comparison with vectors that other implementations wrote."""
