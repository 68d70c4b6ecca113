"""Collectives and transfers between pairs of ranks with known results, for `muster check` and `muster bench`."""
