"""TileLang kernels for CUDA. A function returns the program of one shape; nothing is compiled on import."""
