"""TileLang kernels for Ascend 950. A function returns the program of one shape; nothing is compiled on import."""
