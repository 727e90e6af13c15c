"""Heads that leave the house: tried with the very files that were written, with a model card and sums beside them."""
