"""Metric modules for `evaluate`, each as the library takes one: a folder with a script of the same name.

They are loaded from here by their path, so that no script is fetched from the Hub and run.
"""
