"""The truth: a readable eager model of every component. Imports torch, numpy and itself only."""
