"""The planner: memory and step time of a run before it starts."""
