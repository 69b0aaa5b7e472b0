"""The fast path: one function `<component>_<backend>` per candidate, with the reference signature."""
