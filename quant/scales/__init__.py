"""Weight scales chosen by error instead of by the largest magnitude: same storage, same kernels."""
