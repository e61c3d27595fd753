"""CPU kernels of our own for float32 models; `ops` is the only module that others import."""
