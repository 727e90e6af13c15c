"""Checkpoint layouts that engines load, one file per layout; what two layouts share stands beside them."""
