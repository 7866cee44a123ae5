"""Checks of Kubernetes objects without a cluster: each module yields findings about one object, or about objects together."""
