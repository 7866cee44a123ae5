"""Several runs and teams on one cluster: names and namespaces of objects, and Kueue's quotas."""
