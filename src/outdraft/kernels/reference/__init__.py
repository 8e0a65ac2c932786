"""What the operations mean, in numpy and torch: any device, any dtype, no compiled code of ours."""
