"""Checkpoint layouts that engines load, one file per layout."""
