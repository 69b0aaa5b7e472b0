"""Wrong variants, one file per component, each a right fp32 emulation with one fault switched on.

The emulations are written apart from both the reference and the kernels; without a fault each of them is a control
that must pass the gate.
"""
