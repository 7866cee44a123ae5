"""Links between gateways and replicas, and the directory of replicas."""
