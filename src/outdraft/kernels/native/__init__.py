"""The compiled library: csrc/ under plain C names. Addresses are passed, nothing is decided.

Functions and methods have the names of the table's fields in `kernels.ops`; the functions of these
names in `kernels.torch` are their contracts. A class whose name begins with C mirrors the struct of
the rest of its name in csrc/.
"""
