"""Catalogue of GPUs and networks: peak rates, memory, links, prices."""
