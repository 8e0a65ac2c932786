"""What the operations mean, in numpy and torch: any device, any dtype, no compiled code of ours.

Functions and methods are the operations of their names in `kernels.ops`, which says what they take.
"""
