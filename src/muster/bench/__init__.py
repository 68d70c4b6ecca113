"""How fast this hardware really is."""
