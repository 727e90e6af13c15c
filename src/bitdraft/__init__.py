"""Bitdraft: draft heads trained against the low-bit model that is really served."""

__version__ = "0.1.0"
