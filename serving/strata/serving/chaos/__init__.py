"""`strata chaos`: replicas are killed under load, and every answer is compared with the one an undisturbed endpoint gave."""
