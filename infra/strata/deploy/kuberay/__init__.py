"""Validation rules of the KubeRay 1.7.0 operator beyond its schemas (ray-operator/controllers/ray/utils/validation.go).

The server accepts an object that breaks these rules, and the operator reports it only in an event. Feature gates are assumed to
have their defaults, beta on and alpha off, unless a label of the object says otherwise (`gates.py`).
"""
