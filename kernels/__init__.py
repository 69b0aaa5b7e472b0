"""Kernel sources, one folder per language."""
