"""Benchmarks of this hardware: devices, collectives, links, scaling, overlap."""
