"""The Hub: what people write to name a repo, repos pinned to a commit, and their files. Knows no models."""
