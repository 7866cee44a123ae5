"""Ray clusters: joining, starting one on this machine, supervising its GCS, detecting its death."""
