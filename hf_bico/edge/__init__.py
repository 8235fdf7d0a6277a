"""The edge: what is typed, what is shown, and how a command ends. Computes nothing."""
