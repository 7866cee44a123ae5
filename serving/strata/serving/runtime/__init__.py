"""The Ray Serve application: deployments, replicas, scaling, start and supervision."""
