"""Reports of a profile: terminal, HTML with pictures, JSON."""
