"""Inputs that look fine and are not, by what is wrong with them: each module adds its cases to the list of `cases`."""
