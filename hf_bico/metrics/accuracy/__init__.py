"""Accuracy, for `evaluate`."""
