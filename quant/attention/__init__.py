"""Attention as it is served: the cache, its formats, and those of attention's inputs."""
