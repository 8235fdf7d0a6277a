"""Calibration data: where it is, which rows are read and drawn, and what its columns hold. Knows no models."""
