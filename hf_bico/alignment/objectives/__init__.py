"""The task losses that calibration differentiates, one file an objective."""
