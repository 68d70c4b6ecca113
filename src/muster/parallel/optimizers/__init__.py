"""Optimizers beside torch's fused AdamW, on plain and on sharded parameters.

Each divides gradients by `grad_scale` and, where `found_inf` is 1, leaves weights and state as they
are, on the device, as torch's fused kernels do: the host waits for nothing.
"""
