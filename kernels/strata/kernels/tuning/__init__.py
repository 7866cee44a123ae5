"""Launch configurations by shape and architecture, and the tables shipped with them."""
