"""The embedded small world: small open_clip models and data sets, made on the spot and offline."""
