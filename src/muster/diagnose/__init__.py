"""What went wrong, what to do about it: known failures as data, and where a stalled run stands."""
