"""The hardware of this machine: GPUs, CPUs, network, and the environment variables for it."""
