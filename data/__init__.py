"""Prompts, conversations, loss masks and answers written by the low-bit target."""
