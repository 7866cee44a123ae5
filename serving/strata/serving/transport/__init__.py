"""RPC links between gateways and replicas, and the directory of replica addresses."""
