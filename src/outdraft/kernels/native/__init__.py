"""The compiled library: csrc/ behind plain C names. Addresses are passed, nothing is decided.

Functions and methods are the operations of their names in `kernels.ops`, which says what they do.
"""
