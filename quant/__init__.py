"""Number formats, fake-quantization, recipes and low-bit targets."""
