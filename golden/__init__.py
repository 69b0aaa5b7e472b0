"""Golden vectors: immutable evidence, one folder per component."""
