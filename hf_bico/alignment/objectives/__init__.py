"""The task losses that calibration differentiates, one file per objective."""
