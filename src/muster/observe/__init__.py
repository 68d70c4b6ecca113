"""Metrics, heartbeats, rank balance, profiles and results of a run, and how a terminal shows them."""
