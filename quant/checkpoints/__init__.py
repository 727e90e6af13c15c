"""Quantized checkpoints: what they declare, their codes as they are stored, and writing new ones."""
