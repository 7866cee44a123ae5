"""Models of an endpoint: their stored state, aliases, and the commands and routes that change them."""
