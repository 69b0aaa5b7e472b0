"""The DeepSeek inference stack, twice: a readable reference and a fused path, and the proof that the two agree."""

__version__ = "0.1.0"
