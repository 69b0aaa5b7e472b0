"""Production shapes to time, one module per component."""
