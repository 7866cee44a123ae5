"""The local Prometheus server, its scrape configuration, and the same rules as cluster objects."""
