"""Catalogue of GPUs and networks (peak rates, memory, links, prices), and the memory and processor of this machine."""
