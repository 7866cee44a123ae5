"""Validation rules of the KubeRay 1.7.0 operator beyond its schemas (ray-operator/controllers/ray/utils/validation.go).

The server accepts an object that breaks these rules, and the operator reports it only in an event. Feature gates are assumed to
have their defaults: beta on, alpha off. Rules of KubeRay's mTLS, network policies and history server, which are off, are omitted.
"""
