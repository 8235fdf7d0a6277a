"""A diagnosis: what was found between two models, as data, tables and pictures. Measures nothing."""
