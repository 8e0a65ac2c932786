"""Operations in numpy and torch: any device, any dtype, no compiled code of ours.

Functions and methods have the names of the table's fields in `kernels.ops`; their docstrings are
the contracts. `--kernels reference` runs these alone; a GPU runs most of them.
"""
