"""Choice of simulated decode replicas by the code of production, with what gateways know or with full knowledge."""
