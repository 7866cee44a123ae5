"""What KubeRay 1.7.0 refuses beyond its schemas, as its operator says it (ray-operator/controllers/ray/utils/validation.go).

The operator tells of such an object only in an event, after it was accepted. Feature gates are taken at their defaults: beta on,
alpha off. Left out is what concerns mTLS, network policies and history servers of KubeRay's own, whose gates are off.
"""
