"""Model folders: finding one, and refusing those that cannot be served."""
