"""Each way of cutting a model, as a function that applies it: the model itself knows nothing of them."""
