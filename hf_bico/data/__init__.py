"""Data sets to samples: open them, find their columns, draw rows. Knows no models."""
