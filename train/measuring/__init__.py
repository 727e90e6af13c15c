"""Measuring acceptance: what is decoded, how, against what, and the document that comes of it."""
