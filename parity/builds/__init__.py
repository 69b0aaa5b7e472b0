"""Builds without a device: what one shipped launch compiles, and the compilers that are asked to."""
