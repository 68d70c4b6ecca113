"""Families of readers. `every` loads all of them."""
