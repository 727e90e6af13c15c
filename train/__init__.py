"""Losses, the training loop, checkpoints and the run's configuration."""
